"""Families whose parts are spread in ways of their own, over two devices: the tokens that transformers computes."""

import numpy as np
import pytest
from engine_case import GOLDEN, make_engine

from kv_execution import SamplingParams
from models import load_model

# Experts by default; norms over whole projections are in the test below.
DEFAULT = ("qwen3_moe",)
SLOW = ("olmo2", "gemma2", "qwen2", "gemma3", "phi3", "granite", "smollm3", "mixtral", "qwen3", "mistral_window")


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
