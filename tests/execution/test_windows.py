"""Models whose every layer has a window give pages back while a request lives; what they compute stays the same."""

import numpy as np
import pytest
from dense_step import DenseModel
from engine_case import golden_model, golden_prompts, make_engine

from kv_execution import SamplingParams

CASE = "mistral_window"  # sixteen tokens in every layer
LONG = SamplingParams(max_tokens=150, ignore_eos=True, logprobs=True)
SMALL = {"tokens_per_page": 4, "max_step_tokens": 16, "max_context": 256, "max_requests": 2}
PAGES = 12
"""Of a request of 220 tokens, which has 55."""


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return golden_prompts(CASE)[3]


@pytest.fixture(scope="module")
def expected(prompt) -> list[int]:
    """By forward passes over everything, without pages."""
    return DenseModel(golden_model(CASE), length=256).greedy(prompt, 150)


@pytest.mark.parametrize(
    ("provider", "prefix_cache"),
    [pytest.param("reference", True, marks=pytest.mark.slow), ("native", True), ("native", False)],
)
def test_a_request_longer_than_the_pool_yields_the_tokens_of_a_plain_pass(provider, prefix_cache, prompt, expected):
    engine = make_engine(
        golden_model(CASE), provider=provider, pages=PAGES, debug=True, prefix_cache=prefix_cache, **SMALL
    )
    engine.warmup_paged(shapes=engine.describe().shapes[:1])  # the padding page is NaN from here on
    batcher = engine.batcher()
    request = batcher.submit(prompt, LONG)
    outputs, fewest_free = [], PAGES
    while batcher.has_unfinished:
        outputs += batcher.step()
        if batcher.has_unfinished and len(outputs) > 4:
            stats = engine.stats()
            assert stats.pages_in_use <= 6  # the window's sixteen tokens and the next, and one page to be published
            fewest_free = min(fewest_free, stats.free_pages + stats.cached_pages)
    assert [output.token for output in outputs if output.request_id == request] == expected
    assert fewest_free >= PAGES - 6
    large = make_engine(golden_model(CASE), provider=provider, prefix_cache=prefix_cache, **SMALL)
    (result,) = large.generate([prompt], LONG)
    assert list(result.tokens) == expected
    if provider == "native":
        assert result.logprobs == tuple(output.logprob for output in outputs)


@pytest.mark.usefixtures("without_optimizations")
def test_interpreted_gpu_kernels_read_nothing_of_pages_given_back(prompt, expected):
    engine = make_engine(golden_model(CASE), provider="pallas", pages=PAGES, debug=True, **SMALL)
    engine.warmup_paged(shapes=engine.describe().shapes[:1])
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (result,) = engine.generate([prompt[:48]], params)  # whole steps: padding would write over the NaN
    reference = make_engine(golden_model(CASE), provider="reference", **SMALL)
    assert result.tokens == reference.generate([prompt[:48]], params)[0].tokens


@pytest.mark.parametrize("pages", [PAGES, 100])
def test_prefix_hits_after_pages_were_given_back_continue_as_before(pages, prompt, expected):
    engine = make_engine(golden_model(CASE), provider="native", pages=pages, debug=True, **SMALL)
    cold = engine.generate([prompt], LONG)[0]
    whole = np.concatenate([prompt, cold.tokens])
    for length in (70, 71, 130, 200):
        rest = SamplingParams(max_tokens=len(whole) - length, ignore_eos=True)
        result = engine.generate([whole[:length]], rest)[0]
        assert list(result.tokens) == whole[length:].tolist(), f"a hit of {result.cached_tokens} of {length} tokens"
        assert result.cached_tokens >= 0 if pages == PAGES else result.cached_tokens >= length - 4
    assert engine.stats().pages_in_use == 0


def test_two_long_requests_a_fork_and_a_preemption_share_a_small_pool(prompt, expected):
    engine = make_engine(golden_model(CASE), provider="native", pages=2 * PAGES, debug=True, **SMALL)
    batcher = engine.batcher()
    first = batcher.submit(prompt, LONG)
    tokens = {first: []}
    for step in range(2000):
        if step == 3:
            tokens[batcher.fork(first, LONG)] = []
        if step == 60:
            tokens[batcher.fork(first, LONG)] = []
        if step in (30, 90):
            assert batcher.preempt(first)
        for output in batcher.step():
            tokens[output.request_id].append(output.token)
        if not batcher.has_unfinished:
            break
    assert list(tokens.values()) == [expected] * 3
    assert engine.stats().pages_in_use == 0


def test_a_handle_driven_by_hand_gives_back_as_well(prompt, expected):
    engine = make_engine(golden_model(CASE), provider="native", pages=PAGES, debug=True, **SMALL)
    held = engine.prefill_paged(prompt, LONG)
    tokens = [held.token]
    while step := engine.generate_paged():
        tokens.append(step[held.handle].token)
        assert engine.stats().pages_in_use <= 6
    assert tokens == expected


@pytest.mark.parametrize("case", ["gemma2", "llama"])
def test_a_model_with_a_layer_that_sees_all_gives_nothing_back(case):
    model = golden_model(case)
    assert model.spec.attention_reach is None
    engine = make_engine(model, provider="native", debug=True, **SMALL)
    batcher = engine.batcher()
    batcher.submit(golden_prompts(case)[3], SamplingParams(max_tokens=20, ignore_eos=True))
    while batcher.has_unfinished:
        batcher.step()
        assert not engine._runtime.scheduler.residency.request_map.first_held.any()
    assert engine.stats().peak_pages_in_use >= (70 + 19) // 4
