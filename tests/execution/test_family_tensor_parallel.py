"""Families whose parts are spread in ways of their own, over two devices: the tokens that transformers computes."""

import jax
import numpy as np
import pytest
from engine_case import GOLDEN, make_engine
from jax.sharding import Mesh

from kv_execution import SamplingParams
from kv_kernels.tensor_parallel import EXPERT, TENSOR_AXES, TensorParallelError
from models import load_model

# Experts by default; norms over whole projections are in the test below.
DEFAULT = ("qwen3_moe",)
SLOW = (
    "olmo2",
    "gemma2",
    "qwen2",
    "gemma3",
    "phi3",
    "granite",
    "smollm3",
    "mixtral",
    "qwen3",
    "mistral_window",
    "arcee",
)


@pytest.mark.parametrize("case", [*DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_greedy_tokens_over_two_devices_equal_transformers(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    engine = make_engine(
        load_model(GOLDEN / case, tensor_parallel=2), max_step_tokens=16, max_requests=1, provider="native"
    )
    (result,) = engine.generate([expected["prompt_2"]], SamplingParams(max_tokens=24, ignore_eos=True))
    assert list(result.tokens) == expected["greedy_2"].tolist()


def test_a_projection_s_norm_is_over_the_heads_of_every_device():
    expected = np.load(GOLDEN / "olmo2" / "expected.npz")
    model = load_model(GOLDEN / "olmo2", tensor_parallel=4)  # two K/V heads: each on two devices
    engine = make_engine(model, max_step_tokens=16, max_requests=1, provider="native")
    (result,) = engine.generate([expected["prompt_1"]], SamplingParams(max_tokens=24, ignore_eos=True))
    assert list(result.tokens) == expected["greedy_1"].tolist()


def expert_mesh(shards: int, replicas: int, experts: int) -> Mesh:
    devices = np.array(jax.devices()[: shards * replicas * experts])
    return Mesh(devices.reshape(experts, shards, replicas), (EXPERT, *TENSOR_AXES))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [("qwen3_moe", (2, 1, 2)), ("mixtral", (1, 1, 4)), pytest.param("mixtral", (2, 2, 2), marks=pytest.mark.slow)],
)
def test_experts_spread_over_an_axis_of_their_own(case, sizes):
    expected, mesh = np.load(GOLDEN / case / "expected.npz"), expert_mesh(*sizes)
    model = load_model(GOLDEN / case, tensor_parallel=mesh)
    gate = model.params["layers"]["mlp"]["expert_gate"]["weight"].values
    assert gate.sharding.shard_shape(gate.shape)[1] == model.decoder.config.experts.count // sizes[2]
    assert model.fingerprint == load_model(GOLDEN / case).spread(mesh).fingerprint
    engine = make_engine(model, max_step_tokens=16, max_requests=1, provider="native")
    (result,) = engine.generate([expected["prompt_2"]], SamplingParams(max_tokens=24, ignore_eos=True))
    assert list(result.tokens) == expected["greedy_2"].tolist()


def test_an_axis_that_does_not_divide_the_experts_is_refused():
    with pytest.raises(TensorParallelError, match="experts cannot spread over an axis of 3 devices"):
        load_model(GOLDEN / "mixtral", tensor_parallel=expert_mesh(1, 1, 3))
