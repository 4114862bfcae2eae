"""Every family through the paged engine against transformers: in chunks, in a batch, past its windows, after a hit."""

import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, make_engine

from kv_execution import SamplingParams

ALL = (
    *("qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3"),
    *("mixtral", "qwen3_moe", "arcee"),
)
ON_THE_REFERENCE = ("gemma3", "olmo2", "mixtral")
"""Those that between them have every part that a provider computes; the others are slow tests there."""

GREEDY_24 = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    ("case", "provider"),
    [
        *((case, "native") for case in ALL),
        *((case, "reference") for case in ON_THE_REFERENCE),
        *(pytest.param(case, "reference", marks=pytest.mark.slow) for case in ALL if case not in ON_THE_REFERENCE),
    ],
)
def test_greedy_tokens_and_logits_equal_transformers(case, provider):
    expected = np.load(GOLDEN / case / "expected.npz")
    prompts = [expected[f"prompt_{index}"] for index in range(4)]
    greedy = [expected[f"greedy_{index}"].tolist() for index in range(4)]
    # The longest prompt has 70 tokens: five chunks, and more than four of the windows of 16.
    engine = make_engine(golden_model(case), max_step_tokens=16, max_requests=2, provider=provider)
    first = engine.generate(prompts, GREEDY_24)
    assert [list(result.tokens) for result in first] == greedy
    assert all(result.cached_tokens == 0 for result in first)
    again = engine.generate(prompts[2:], GREEDY_24)
    assert [list(result.tokens) for result in again] == greedy[2:]
    assert all(result.cached_tokens >= 32 for result in again)
    difference = engine.score(prompts[3]) - expected["logits_3"]
    # Log-probabilities and logits differ by a constant per row.
    difference -= difference.mean(axis=-1, keepdims=True)
    assert np.abs(difference).max() <= max(5e-4, 5 * float(expected["noise_3"]))
    assert engine.stats().pages_in_use == 0


@pytest.mark.parametrize(
    "case", ["gemma3", *(pytest.param(case, marks=pytest.mark.slow) for case in ALL if case != "gemma3")]
)
def test_prompts_in_one_chunk_on_small_pages_have_the_same_tokens(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    prompts = [expected[f"prompt_{index}"] for index in (2, 3)]
    engine = make_engine(
        golden_model(case), max_step_tokens=128, max_requests=2, tokens_per_page=3, provider="native", debug=True
    )
    results = engine.generate(prompts, GREEDY_24)
    assert [list(result.tokens) for result in results] == [expected[f"greedy_{index}"].tolist() for index in (2, 3)]
