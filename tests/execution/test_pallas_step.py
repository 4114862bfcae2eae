"""The Triton kernels inside the whole step of an engine: interpreted, and lowered for a GPU on a host without one."""

import re

import jax
import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, make_engine
from jax.sharding import Mesh

from benchmarks.random_llama import write_random_llama
from kv_control.buckets import StepShape
from kv_execution import SamplingParams
from kv_execution.step import build_step_programs
from kv_kernels.pallas import PallasProvider
from kv_kernels.tensor_parallel import EXPERT, TENSOR_AXES
from models import load_model

SMALL = {"max_requests": 2, "max_step_tokens": 16, "max_context": 64}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
MIXED, DECODE = StepShape(16, 2, 256), StepShape(2, 2, 256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_llama(tmp_path_factory.mktemp("llama"), layers=2, num_attention_heads=6, num_key_value_heads=2)


@pytest.mark.usefixtures("without_optimizations")
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_on_interpreted_kernels_yields_the_references_tokens(checkpoint, width):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length) for length in (37, 5, 20)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    tokens = {}
    for name, model in (
        ("pallas", load_model(checkpoint, tensor_parallel=width)),
        ("reference", load_model(checkpoint)),
    ):
        engine = make_engine(model, provider=name, debug=True, pages=24, **SMALL)
        assert engine.describe().provider == name
        tokens[name] = [result.tokens for result in engine.generate(prompts, params)]
    assert tokens["pallas"] == tokens["reference"]


@pytest.mark.usefixtures("without_optimizations")
@pytest.mark.parametrize("case", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts_over_an_axis_of_their_own_yield_transformers_tokens_on_interpreted_kernels(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), (EXPERT, *TENSOR_AXES))
    engine = make_engine(load_model(GOLDEN / case, tensor_parallel=mesh), provider="pallas", **SMALL)
    results = engine.generate([expected[f"prompt_{index}"] for index in (0, 2)], GREEDY)
    assert [list(result.tokens) for result in results] == [
        expected[f"greedy_{index}"].tolist()[:12] for index in (0, 2)
    ]


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


def donated_pools(text: str, shape: str) -> int:
    """Arguments of a pool's shape that are given away."""
    (signature,) = [line for line in text.splitlines() if "func.func public @main" in line]
    arguments = signature.split(" -> ")[0].split("%arg")
    return sum(
        f"tensor<{shape}xf32>" in argument and ("tf.aliasing_output" in argument or "jax.buffer_donor" in argument)
        for argument in arguments
    )


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("width", [1, 2])
def test_the_step_lowers_for_a_gpu_with_its_pools_in_place(checkpoint, platform, width):
    model = load_model(checkpoint, tensor_parallel=width)
    text = lowered_step(model, platform, MIXED)
    calls = kernel_calls(text)
    assert set(calls) == {"jaxkv_append_kv", "jaxkv_attend_tiles", "jaxkv_attend_splits", "jaxkv_merge_splits"}
    assert aliases(calls["jaxkv_append_kv"]) == [(3, 0), (4, 1)]
    assert aliases(calls["jaxkv_merge_splits"]) == [(5, 0)]
    # Pages of two layers, tokens, two K/V heads of 8: a rank with one head has room for twice as many pages.
    pages = 512 * width
    assert donated_pools(text, f"{pages}x16x2x8") == 2
    of_a_rank = f"tensor<{pages}x16x{2 // width}x8xf32>"
    operands, results = calls["jaxkv_append_kv"].split(" -> ")
    assert (operands.count(of_a_rank), results.count(of_a_rank)) == (2, 2)


def test_a_step_of_decodes_needs_no_tiles(checkpoint):
    calls = kernel_calls(lowered_step(load_model(checkpoint), "cuda", DECODE))
    assert set(calls) == {"jaxkv_append_kv", "jaxkv_attend_splits", "jaxkv_merge_splits"}
    assert aliases(calls["jaxkv_merge_splits"]) == []


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_a_step_of_a_mixture_lowers_with_its_experts_in_grouped_products(case, platform):
    text = lowered_step(golden_model(case), platform, MIXED)
    assert "jaxkv_grouped_product" in kernel_calls(text)
    # Gate and up in one kernel, down in another; the only loop is over the layers.
    assert text.count('name = "jaxkv_grouped_product"') == 2
    assert text.count("stablehlo.while") == 1
    assert text.count("stablehlo.dot_general") == len(["q", "k", "v", "o", "router"])
