"""The Triton kernels inside the whole step of an engine: run interpreted, and lowered for GPUs on a host that has none."""

import re

import numpy as np
import pytest
from engine_case import make_engine

from benchmarks.random_llama import write_random_llama
from kv_control.buckets import StepShape
from kv_execution import SamplingParams
from kv_execution.step import build_step_programs
from kv_kernels.pallas import PallasProvider
from models import load_model

SMALL = {"max_requests": 2, "max_step_tokens": 16, "max_context": 64}
MIXED, DECODE = StepShape(16, 2, 256), StepShape(2, 2, 256)
POOLS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_llama(tmp_path_factory.mktemp("llama"), layers=2, num_attention_heads=6, num_key_value_heads=2)


def test_an_engine_on_interpreted_kernels_yields_the_references_tokens(checkpoint):
    model = load_model(checkpoint)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length) for length in (37, 5, 20)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    tokens = {}
    for name in ("pallas", "reference"):
        engine = make_engine(model, provider=name, debug=True, **SMALL)
        assert engine.describe().provider == name
        tokens[name] = [result.tokens for result in engine.generate(prompts, params)]
    assert tokens["pallas"] == tokens["reference"]


def lowered_step(model, platform: str, shape: StepShape) -> str:
    """StableHLO of the forward program that a GPU of `platform` would run."""
    engine = make_engine(model, provider="pallas", **SMALL)  # for its arrays: a plan does not depend on the platform
    programs = build_step_programs(
        model, PallasProvider(), engine.describe().layout, unroll_layers=False, on_trace=lambda: None
    )
    runtime = engine._runtime
    traced = programs.forward.trace(model.params, runtime.state, runtime._inputs.of(None, shape))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def kernel_calls(text: str) -> dict[str, str]:
    """The custom call of every Triton kernel, by the kernel's name."""
    calls = [line for line in text.splitlines() if "@__gpu$xla.gpu.triton" in line]
    return {re.search(r'\bname = "(\w+)"', call)[1]: call for call in calls}


def aliases(call: str) -> list[tuple[int, int]]:
    """(operand, result) of everything that a call updates in place."""
    found = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d*)\], operand_index = (\d+)", call)
    return [(int(operand), int(result or 0)) for result, operand in found]


def donated(text: str, mark: str, pool: str) -> int:
    """Arguments of the shape of a pool that carry `mark`."""
    (signature,) = [line for line in text.splitlines() if "func.func public @main" in line]
    return len(re.findall(rf"tensor<{pool}>[^%]*{mark}", signature))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("width", [1, 2])
def test_the_step_lowers_for_a_gpu_with_its_pools_in_place(checkpoint, platform, width):
    model = load_model(checkpoint, tensor_parallel=width)
    text = lowered_step(model, platform, MIXED)
    calls = kernel_calls(text)
    assert set(calls) == {"jaxkv_append_kv", "jaxkv_attend_tiles", "jaxkv_attend_splits", "jaxkv_merge_splits"}
    assert aliases(calls["jaxkv_append_kv"]) == [(3, 0), (4, 1)]
    assert aliases(calls["jaxkv_merge_splits"]) == [(5, 0)]
    engine = make_engine(model, provider="pallas", **SMALL)
    pools, heads, *head_dim = 0, *engine.describe().layout.pool_shape_per_shard[2:]
    pages, tokens_per_page = engine.describe().layout.pool_shape_per_shard[:2]
    pool = f"{pages}x{tokens_per_page}x{heads * width}x{head_dim[0]}xf32"
    mark = "tf.aliasing_output" if width == 1 else "jax.buffer_donor = true"
    assert donated(text, mark, pool) == POOLS
    of_a_rank = f"tensor<{pages}x{tokens_per_page}x{heads}x{head_dim[0]}xf32>"
    assert calls["jaxkv_append_kv"].count(of_a_rank) == 2 * POOLS


def test_a_step_of_decodes_needs_no_tiles(checkpoint):
    calls = kernel_calls(lowered_step(load_model(checkpoint), "cuda", DECODE))
    assert set(calls) == {"jaxkv_append_kv", "jaxkv_attend_splits", "jaxkv_merge_splits"}
    assert aliases(calls["jaxkv_merge_splits"]) == []
