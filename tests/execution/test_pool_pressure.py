"""Too few pages: what cannot run is refused with the numbers, and the rest finishes."""

import numpy as np
import pytest
from engine_case import golden_model, golden_prompts, make_engine

from kv_common.errors import JaxkvError
from kv_control.page_allocator import OutOfPagesError
from kv_control.request_map import NoFreeRowError, StaleHandleError
from kv_control.scheduler import RequestTooLargeError
from kv_execution import PromptError, SamplingParams

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)


def test_a_request_that_could_not_run_alone_is_refused_with_the_numbers():
    engine = make_engine(golden_model("llama"), pages=3)
    with pytest.raises(
        RequestTooLargeError, match=r"40 prompt tokens and 20 new ones need 4 pages of 16 tokens and the pool has 3"
    ):
        engine.batcher().submit(np.ones(40, int), SamplingParams(max_tokens=20))
    assert not engine.batcher().has_unfinished
    # The last token needs no K/V: 40 + 9 tokens fit in 48 slots.
    assert len(engine.generate([np.ones(40, int)], SamplingParams(max_tokens=9, ignore_eos=True))[0].tokens) == 9


def test_four_requests_in_a_pool_for_one_and_a_half_all_finish():
    prompt = golden_prompts("llama")[2]  # 33 tokens, 4 pages with its answer
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = make_engine(golden_model("llama")).generate([prompt], params)[0].tokens
    engine = make_engine(golden_model("llama"), pages=6, debug=True)
    batcher = engine.batcher()
    for _ in range(4):
        batcher.submit(prompt, params)
    outputs: dict[int, list[int]] = {}
    for _ in range(4 * (24 + 3)):  # as many steps as one after the other would take
        for output in batcher.step():
            outputs.setdefault(output.request_id, []).append(output.token)
        if not batcher.has_unfinished:
            break
    assert [tuple(tokens) for tokens in outputs.values()] == [expected] * 4
    assert engine.stats().preemptions > 0
    assert engine.stats().pages_in_use == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 2, 320], "token id 320 at position 2 is outside the vocabulary of 320 tokens"),
        ([-1], "token id -1 at position 0"),
        ([1.5], "flat list of whole numbers"),
        ([[1, 2]], "flat list of whole numbers"),
        ([1] * 129, "the prompt has 129 tokens and the context holds 128"),
        ([1] * 500, "the prompt has 500 tokens and the context holds 128"),
    ],
)
def test_a_bad_prompt_is_one_line_and_disturbs_nothing(prompt, message):
    engine = make_engine(golden_model("llama"))
    expected = engine.generate([[1, 2, 3]], EIGHT)[0].tokens
    batcher = engine.batcher()
    good = batcher.submit([1, 2, 3], EIGHT)
    batcher.step()
    for refuse in (batcher.submit, engine.prefill_paged, engine.score):
        with pytest.raises(JaxkvError, match=message) as caught:
            refuse(prompt)
        assert "\n" not in str(caught.value)
    with pytest.raises(JaxkvError, match=message):
        engine.generate([[4, 5], prompt])
    tokens = []
    while batcher.has_unfinished:
        tokens += [output.token for output in batcher.step() if output.request_id == good]
    assert tuple(tokens) == expected
    assert engine.stats().pages_in_use == 0
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_prompt_one_short_of_the_context_gets_one_token():
    engine = make_engine(golden_model("llama"))
    result = engine.generate([np.ones(127, int)], EIGHT)[0]
    assert len(result.tokens) == 1
    assert result.finish_reason == "length"


def test_out_of_range_ids_in_the_parameters_are_refused():
    engine = make_engine(golden_model("llama"))
    for params in (SamplingParams(logit_bias={320: 1.0}), SamplingParams(stop_token_ids=(999,))):
        with pytest.raises(JaxkvError, match="the model knows 320 tokens"):
            engine.batcher().submit([1], params)
    assert not engine.batcher().has_unfinished


def test_a_stop_token_ends_a_request_and_is_its_last_token():
    engine = make_engine(golden_model("llama"))
    tokens = engine.generate([[1, 2, 3]], EIGHT)[0].tokens
    stopped = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, stop_token_ids=(tokens[3],)))[0]
    assert stopped.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped.finish_reason == "stop"
    assert engine.stats().pages_in_use == 0


def test_handles_that_do_not_fit_are_refused_and_change_nothing():
    engine = make_engine(golden_model("llama"), pages=5, max_requests=2)
    held = engine.prefill_paged(np.ones(48, int), SamplingParams(max_tokens=16, ignore_eos=True))
    before = engine.stats()
    with pytest.raises(OutOfPagesError, match="3 pages requested, 2 free"):
        engine.prefill_paged(np.full(33, 2), EIGHT)
    other = engine.prefill_paged(np.full(16, 3), EIGHT)
    with pytest.raises(NoFreeRowError):
        engine.prefill_paged([1], EIGHT)
    with pytest.raises(OutOfPagesError, match="2 pages requested, 1 free"):
        engine.generate_paged()
    engine.release(other.handle)
    assert engine.stats().pages_in_use == before.pages_in_use
    assert len(engine.generate_paged()) == 1
    engine.release(held.handle)
    with pytest.raises(StaleHandleError):
        engine.release(held.handle)
    with pytest.raises(StaleHandleError, match="12345 is no handle"):
        engine.release(12345)
    assert engine.stats().pages_in_use == 0


def test_a_queue_that_waits_for_held_pages_says_so_instead_of_spinning():
    engine = make_engine(golden_model("llama"), pages=4)
    held = engine.prefill_paged(np.ones(64, int), SamplingParams(max_tokens=1))
    with pytest.raises(OutOfPagesError):
        engine.generate([np.ones(20, int)], EIGHT)
    engine.release(held.handle)
    assert len(engine.generate([np.ones(20, int)], EIGHT)[0].tokens) == 8


def test_tokens_of_other_requests_survive_a_call_of_generate():
    engine = make_engine(golden_model("llama"))
    expected = engine.generate([[1, 2, 3]], EIGHT)[0].tokens
    batcher = engine.batcher()
    mine = batcher.submit([1, 2, 3], EIGHT)
    engine.generate([[7, 8]], EIGHT)
    tokens = []
    while batcher.has_unfinished:
        tokens += [output.token for output in batcher.step() if output.request_id == mine]
    assert tuple(tokens) == expected


def test_empty_prompts_are_named_before_anything_runs():
    with pytest.raises(PromptError):
        make_engine(golden_model("llama")).generate([[]])
