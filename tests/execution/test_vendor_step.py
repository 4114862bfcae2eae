"""The whole engine step with flashinfer and aiter: what it lowers to for their platforms, and that it runs.

The tables below are the vendors' interfaces, operand by operand: FlashInfer's csrc/page.cu (append_paged_kv_cache),
csrc/batch_prefill.cu (BatchPrefillWithPagedKVCacheRun) and csrc/batch_decode.cu (BatchDecodeWithPagedKVCacheRun);
jax-aiter's csrc/ffi/kv/append_kv_ja.cu, paged_prefill_ja.cu and paged_attention_ja.cu, whose handlers bind operands by
position and attributes by name.
"""

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from aiter_stand_in import DescribedAiter, decode_name
from custom_calls import custom_calls
from engine_case import golden_model, golden_prompts, make_engine

import kv_execution.planning
from benchmarks.random_llama import write_random_llama
from kv_control.buckets import StepShape
from kv_execution import PagedEngine, SamplingParams
from kv_kernels.aiter import AiterProvider
from kv_kernels.flashinfer import FlashInferProvider
from kv_kernels.provider import KernelNeeds, KernelProvider
from kv_kernels.selection import ChosenProvider
from models import load_model

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 3, 8, 2, 128, 16
MIXED, DECODE = StepShape(64, 4, 256), StepShape(4, 4, 256)
SCALE = np.float32(HEAD_DIM**-0.5)
PREFILL_INFO, DECODE_INFO = tuple(range(100, 115)), tuple(range(200, 210))
CONFIGURATION = (
    "dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_posenc_0_"
    "use_swa_False_use_logits_cap_False"
)


_TESTS = itertools.count()


class DescribedFlashInfer:
    """A FlashInfer that plans, and of which nothing can run."""

    def why_missing(self, modules):
        return None

    def register(self, call) -> None:
        pass

    def plan(self, module, scratch_bytes, schedule, *arguments):
        return PREFILL_INFO if "prefill" in module else DECODE_INFO


def engine_of(monkeypatch, make: Callable[[KernelNeeds], KernelProvider], model, **settings) -> PagedEngine:
    """An engine that runs what `make` makes, whatever the platform."""

    def choose(needs, requested):
        return ChosenProvider(make(needs), "the test's own")

    monkeypatch.setattr(kv_execution.planning, "choose_provider", choose)
    return make_engine(model, provider=f"made for test {next(_TESTS)}", **settings)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    directory = write_random_llama(
        tmp_path_factory.mktemp("wide"),
        **{"layers": LAYERS, "hidden": 32, "head_dim": HEAD_DIM},
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    return load_model(directory, dtype="float16")


def lowered_step(engine: PagedEngine, shape: StepShape, platform: str):
    runtime = engine._runtime
    traced = runtime.programs.forward.trace(engine.model.params, runtime.state, runtime._inputs.of(None, shape))
    return traced.lower(lowering_platforms=(platform,))


def described(attributes: dict) -> dict:
    """Attributes as the module's text has them."""

    def text(value) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str):
            return f'"{value}"'
        if isinstance(value, tuple):
            return f"dense<[{', '.join(map(str, value))}]> : tensor<{len(value)}xi64>"
        return f"{value} : i64"

    return {name: text(value) for name, value in attributes.items() if not isinstance(value, np.float32)}


def assert_calls(lowered, expected: list[tuple]) -> None:
    """One call of each row of `expected` in the body that every layer runs: target, operands, results, attributes and
    aliases.
    """
    calls = custom_calls(lowered, ("flashinfer", "AppendKv", "Paged"))
    assert [call.target for call in calls] == [row[0] for row in expected]
    for call, (_, operands, results, attributes, aliases) in zip(calls, expected, strict=True):
        assert call.operands == operands
        assert call.results == results
        assert call.aliases == aliases
        floats = {name: value for name, value in attributes.items() if isinstance(value, np.float32)}
        got = dict(call.attributes)
        for name, value in floats.items():
            number, kind = got.pop(name).split(" : ")
            assert (np.float32(number), kind) == (value, "f32")
        assert got == described(attributes)


def assert_pools_are_donated(lowered, pool: str) -> None:
    arguments = lowered.as_text().split("@main(")[1].split(") ->")[0]
    donated = [part for part in arguments.split("%arg") if f"tensor<{pool}>" in part and "tf.aliasing_output" in part]
    assert len(donated) == 2


def sizes(engine: PagedEngine, shape: StepShape):
    """Types of the step's arrays."""
    pages = LAYERS * engine.describe().layout.num_pages
    entries = shape.rows * shape.max_seqlen_k // PAGE
    return {
        "pool": f"{pages}x{PAGE}x{KV_HEADS}x{HEAD_DIM}xf16",
        "new": f"{shape.tokens}x{KV_HEADS}x{HEAD_DIM}xf16",
        "q": f"{shape.tokens}x{HEADS}x{HEAD_DIM}xf16",
        "tokens": f"{shape.tokens}xi32",
        "tokens + 1": f"{shape.tokens + 1}xi32",
        "rows": f"{shape.rows}xi32",
        "rows + 1": f"{shape.rows + 1}xi32",
        "entries": f"{entries}xi32",
    }


@pytest.mark.parametrize("shape", [MIXED, DECODE], ids=["mixed", "decode"])
def test_the_step_of_flashinfer_lowers_for_cuda(monkeypatch, wide_model, shape):
    engine = engine_of(monkeypatch, lambda needs: FlashInferProvider(needs, DescribedFlashInfer()), wide_model)
    of = sizes(engine, shape)
    lowered = lowered_step(engine, shape, "cuda")
    plan = engine._runtime._inputs.of(None, shape).plan
    schedule, scratch = f"{plan.schedule.size}xui8", f"{plan.static.scratch_bytes}xui8"
    append = (
        "flashinfer.page.append_paged_kv_cache",
        # append_key, append_value, batch_indices, positions, paged_k_cache, paged_v_cache, kv_indices, kv_indptr,
        # kv_last_page_len
        [
            *(of["new"], of["new"], of["tokens"], of["tokens"], of["pool"], of["pool"]),
            *(of["tokens"], of["tokens + 1"], of["tokens"]),
        ],
        [of["pool"], of["pool"]],
        {"layout": 0},
        {4: 0, 5: 1},
    )
    attributes = {"layout": 0, "window_left": -1, "logits_soft_cap": np.float32(0), "sm_scale": SCALE}
    # int_workspace_buffer, q, paged_k_cache, paged_v_cache, [qo_indptr,] paged_kv_indptr, paged_kv_indices,
    # paged_kv_last_page_len -> o, float_workspace_buffer
    cache = [schedule, of["q"], of["pool"], of["pool"]]
    rows = [of["rows + 1"], of["entries"], of["rows"]]
    if shape == DECODE:
        attend = (
            f"flashinfer.batch_decode_with_kv_cache_{CONFIGURATION}.run",
            [*cache, *rows],
            [of["q"], scratch],
            {"plan_info": DECODE_INFO, **attributes},
            {},
        )
    else:
        attend = (
            f"flashinfer.batch_prefill_with_kv_cache_{CONFIGURATION}_f16qk_False.paged_run",
            [*cache, of["rows + 1"], *rows],
            [of["q"], scratch],
            {"plan_info": PREFILL_INFO, "mask_mode": 1, **attributes},
            {},
        )
    assert_calls(lowered, [append, attend])
    assert_pools_are_donated(lowered, of["pool"])


@pytest.mark.parametrize("shape", [MIXED, DECODE], ids=["mixed", "decode"])
def test_the_step_of_aiter_lowers_for_rocm(monkeypatch, wide_model, shape):
    engine = engine_of(monkeypatch, lambda needs: AiterProvider(DescribedAiter()), wide_model)
    of = sizes(engine, shape)
    lowered = lowered_step(engine, shape, "rocm")
    append = (
        "AppendKvJA",
        # k_new, v_new, slot_mapping, k_scale, v_scale, k_pool, v_pool
        [of["new"], of["new"], of["tokens"], "1xf32", "1xf32", of["pool"], of["pool"]],
        [of["pool"], of["pool"]],
        {"kv_cache_dtype": "auto"},
        {5: 0, 6: 1},
    )
    cache, rows = [of["q"], of["pool"], of["pool"]], [of["rows + 1"], of["entries"], of["rows"]]
    common = {"scale": SCALE, "logits_soft_cap": np.float32(0)}
    if shape == DECODE:
        workspace = shape.rows * HEADS * (2 * 4 + 2 * HEAD_DIM)
        attend = (
            "PagedAttentionJA",
            # query, k_pool, v_pool, kv_indptr, kv_page_indices, kv_last_page_lens, k_scale, v_scale, workspace
            [*cache, *rows, "1xf32", "1xf32", f"{workspace}xui8"],
            [of["q"]],
            {**common, "max_num_partitions": 1, "func_name": decode_name(HEADS // KV_HEADS, 128, "float16", 16)},
            {},
        )
    else:
        attend = (
            "PagedPrefillJA",
            # query, k_pool, v_pool, cu_seqlens_q, kv_indptr, kv_page_indices, kv_last_page_lens
            [*cache, of["rows + 1"], *rows],
            [of["q"]],
            {
                **common,
                **{"max_seqlen_q": 64, "max_seqlen_k": 256, "causal": True},
                **{"window_size_left": -1, "window_size_right": -1},
            },
            {},
        )
    assert_calls(lowered, [append, attend])
    assert_pools_are_donated(lowered, of["pool"])


def stand_in(name: str) -> Callable[[KernelNeeds], KernelProvider]:
    pytest.importorskip("jax_tvm_ffi", reason="stand-ins are registered through jax-tvm-ffi, which is not installed")
    if name == "aiter":
        from aiter_stand_in import AiterStandIn

        return lambda needs: AiterProvider(AiterStandIn())
    from flashinfer_stand_in import FlashInferStandIn

    return lambda needs: FlashInferProvider(needs, FlashInferStandIn())


# Prefill in chunks beside decodes; in debug mode freed pages are poisoned.
SETTINGS = {"max_requests": 2, "max_step_tokens": 16, "max_context": 64, "debug": True}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@functools.cache
def reference_tokens() -> list:
    engine = make_engine(golden_model("llama", "float16"), provider="reference", **SETTINGS)
    return [done.tokens for done in engine.generate(prompts(), PARAMS)]


def prompts() -> list[np.ndarray]:
    return golden_prompts("llama")[:3]


@pytest.mark.parametrize("name", ["flashinfer", "aiter"])
def test_an_engine_on_a_stand_in_equals_the_reference(monkeypatch, name):
    engine = engine_of(monkeypatch, stand_in(name), golden_model("llama", "float16"), burst_s=1e9, **SETTINGS)
    assert engine._runtime.burst_s == 0, "its plans are of one step"
    pointers = [pool.unsafe_buffer_pointer() for pool in engine._runtime.state.pools]
    assert [done.tokens for done in engine.generate(prompts(), PARAMS)] == reference_tokens()
    assert [pool.unsafe_buffer_pointer() for pool in engine._runtime.state.pools] == pointers
    shapes = engine._runtime.counters.shapes
    assert any(shape.tokens == shape.rows for shape in shapes)
    assert any(shape.tokens > shape.rows for shape in shapes)
