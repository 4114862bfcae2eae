"""Debug mode: freed pages are loud, and nothing ever hears them."""

import numpy as np
import pytest
from engine_case import golden_model, make_engine

from kv_control.page_allocator import DirtyPageError
from kv_control.step_builder import StepBuilder
from kv_execution import SamplingParams

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)


def test_freed_pages_hold_nan_and_change_no_output():
    lengths = (1, 15, 16, 17, 33)
    prompts = [np.arange(length) + 3 for length in lengths]
    quiet = make_engine(golden_model("llama"), pages=30)
    expected = [quiet.generate([prompt], EIGHT)[0].tokens for prompt in prompts]
    engine = make_engine(golden_model("llama"), pages=30, debug=True, prefix_cache=False)
    for _ in range(3):
        assert [result.tokens for result in engine.generate(prompts, EIGHT)] == expected
    engine.generate([[1]], EIGHT)
    allocator = engine._runtime.scheduler.residency.allocator
    freed = np.flatnonzero(allocator.dirty & (allocator.reference_count == 0))
    assert len(freed) > 5
    pool = np.asarray(engine._runtime.state.pools.v)
    layout = engine.describe().layout
    # The last request's own page was freed after the last step, so nothing has poisoned it yet.
    loud = [page for page in freed if np.isnan(pool[page]).all() and np.isnan(pool[layout.num_pages + page]).all()]
    assert len(loud) >= len(freed) - 1


def test_a_missed_scrub_is_an_exception(monkeypatch):
    engine = make_engine(golden_model("llama"), pages=2)
    engine.generate([np.arange(20)], EIGHT)
    monkeypatch.setattr(StepBuilder, "confirm", lambda self, reservation: None)
    with pytest.raises(DirtyPageError):
        engine.generate([np.arange(20)], EIGHT)


def test_a_dealt_page_is_cleared_before_it_is_used():
    engine = make_engine(golden_model("llama"), pages=2, debug=True)
    engine.generate([np.arange(20)], EIGHT)
    first = engine.prefill_paged([5], EIGHT)
    page = engine._runtime.scheduler.residency.request_map.pages_of(first.handle.row)[0]
    pool = np.asarray(engine._runtime.state.pools.k)
    assert np.abs(pool[page, 0]).sum() > 0
    assert not pool[page, 1:].any()


def test_a_request_that_ends_and_is_aborted_in_the_same_step_is_freed_once():
    engine = make_engine(golden_model("llama"), debug=True)
    batcher = engine.batcher()
    request = batcher.submit([1, 2], SamplingParams(max_tokens=1))
    outputs = []
    while not outputs:
        outputs = batcher.step()
    assert outputs[-1].finish_reason == "length"
    assert not batcher.abort(request)
    assert engine.stats().pages_in_use == 0
