"""Shared prefixes cost nothing and change nothing."""

import functools

import numpy as np
import pytest
from engine_case import golden_model, make_engine

import kv_execution.engine
import kv_execution.planning
from benchmarks.random_llama import write_random_llama
from kv_control.prefix_values import MissReason
from kv_control.scheduler import Scheduler
from kv_execution import PagedEngine, SamplingParams
from kv_execution.adapters import WITHOUT
from kv_execution.runtime import PagedRuntime
from models import load_model

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
FILLING = SamplingParams(max_tokens=16, ignore_eos=True)
"""Long enough for the answer to fill the prompt's last page, which is then cached as well."""
PENALISED = SamplingParams(max_tokens=6, ignore_eos=True, repetition_penalty=1.3, temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 320, 52).astype(np.int32)


@pytest.fixture(scope="module")
def cold(prompt):
    """Tokens of prompts that share `length` tokens with `prompt`, computed without a cache."""
    engine = make_engine(golden_model("llama"), prefix_cache=False)
    return {
        (length, params): engine.generate([changed_after(prompt, length)], params)[0].tokens
        for length in range(len(prompt) + 1)
        for params in (GREEDY, PENALISED)
    }


def changed_after(prompt: np.ndarray, length: int) -> np.ndarray:
    """`prompt` with every token from index `length` on another one."""
    return np.concatenate([prompt[:length], (prompt[length:] + 1) % 320]).astype(np.int32)


@pytest.mark.parametrize("params", [GREEDY, PENALISED])
def test_a_warm_run_is_identical_to_a_cold_one_at_every_hit_length(prompt, cold, params):
    engine = make_engine(golden_model("llama"), debug=True)
    for length in range(len(prompt) + 1):
        engine.reset_prefix_cache()
        engine.generate([prompt], FILLING)
        result = engine.generate([changed_after(prompt, length)], params)[0]
        assert result.tokens == cold[length, params], f"{length} tokens shared"
        # One token is always computed.
        assert result.cached_tokens == min(length, len(prompt) - 1), f"{length} tokens shared"


def test_hits_and_misses_in_one_batch_do_not_mix(prompt, cold):
    engine = make_engine(golden_model("llama"), debug=True)
    engine.generate([prompt], FILLING)
    lengths = [0, 52, 16, 33]
    results = engine.generate([changed_after(prompt, length) for length in lengths], GREEDY)
    assert [result.tokens for result in results] == [cold[length, GREEDY] for length in lengths]
    assert [result.cached_tokens for result in results] == [0, 51, 16, 33]


def test_a_hash_that_always_collides_changes_no_output(prompt, cold, monkeypatch):
    colliding = functools.partial(Scheduler, digest=lambda data: b"the same key for")
    monkeypatch.setattr(kv_execution.planning, "Scheduler", colliding)
    engine = make_engine(golden_model("llama"), debug=True)
    engine.generate([prompt], FILLING)
    for length in (0, 15, 16, 17, 48, 52):
        assert engine.generate([changed_after(prompt, length)], GREEDY)[0].tokens == cold[length, GREEDY]
    assert engine.stats().pages_in_use == 0


def test_another_salt_hits_nothing(prompt):
    engine = make_engine(golden_model("llama"))
    batcher = engine.batcher()
    cached = {}
    for salt in ("", "tenant", "", "tenant"):
        request = batcher.submit(prompt, FILLING, cache_salt=salt)
        while batcher.has_unfinished:
            for output in batcher.step():
                cached.setdefault(request, output.cached_tokens)
    assert list(cached.values()) == [0, 0, 51, 51]
    assert engine.prefix_statistics().misses[MissReason.NAMESPACE] == 1


def test_other_weights_under_the_same_name_hit_nothing(tmp_path):
    models = [
        load_model(write_random_llama(tmp_path / str(seed) / "same-name", layers=2, seed=seed)) for seed in (0, 1)
    ]
    assert models[0].spec == models[1].spec
    assert len({make_engine(model)._namespace_of("", WITHOUT) for model in models}) == 2


def test_a_request_may_decline_the_cache(prompt, cold):
    engine = make_engine(golden_model("llama"))
    batcher = engine.batcher()
    for read_cache, cached in ((True, 0), (False, 0), (True, 51)):
        batcher.submit(prompt, FILLING, read_cache=read_cache)
        tokens = []
        while batcher.has_unfinished:
            for output in batcher.step():
                tokens.append(output.token)
                assert output.cached_tokens == cached
        assert tuple(tokens[:6]) == cold[52, GREEDY]
    assert engine.prefix_statistics().misses[MissReason.UNCACHEABLE] == 1


def test_scores_of_every_token_are_computed_though_the_prompt_is_cached(prompt):
    engine = make_engine(golden_model("llama"))
    before = engine.score(prompt)
    engine.generate([prompt], GREEDY)
    np.testing.assert_array_equal(engine.score(prompt), before)
    assert before.shape == (52, 320)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_scores_do_not_depend_on_chunks_or_on_what_is_cached(prompt, chunk):
    whole = make_engine(golden_model("llama")).score(prompt)
    engine = make_engine(golden_model("llama"), max_requests=1, max_step_tokens=chunk)
    engine.generate([prompt], GREEDY)
    np.testing.assert_allclose(engine.score(prompt), whole, atol=1e-4)


def test_handles_driven_by_hand_share_too(prompt, cold):
    engine = make_engine(golden_model("llama"), debug=True)
    first, second = (engine.prefill_paged(prompt, GREEDY) for _ in range(2))
    # Fifty-two tokens fill three pages; what is left of the fourth is in no full page yet.
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    tokens = {first.handle: [first.token], second.handle: [second.token]}
    while step := engine.generate_paged():
        for handle, output in step.items():
            tokens[handle].append(output.token)
    assert {tuple(got) for got in tokens.values()} == {cold[52, GREEDY]}
    assert engine.stats().pages_in_use == 5
    for handle in tokens:
        engine.release(handle)
    assert engine.stats().pages_in_use == 0


def test_miss_reasons_and_evictions_can_be_read_out(prompt):
    engine = make_engine(golden_model("llama"), pages=8)
    other = (prompt + 100) % 320
    for tokens in (prompt, prompt[:33], other, (prompt + 200) % 320, prompt):
        engine.generate([tokens], GREEDY)
    statistics = engine.prefix_statistics()
    assert statistics.lookups == 5
    assert statistics.misses[MissReason.NONE] == 1
    assert statistics.misses[MissReason.NO_SUCH_PREFIX] == 3
    assert statistics.misses[MissReason.EVICTED] == 1
    assert statistics.evictions > 0
    # Two pages of the prompt's beginning, and at the end one, which outlived the pages behind it.
    assert statistics.hit_tokens == 32 + 16


class Counted:
    """An engine that has run requests of `shared` common tokens and some of their own, and what it computed."""

    def __init__(self, engine: PagedEngine, requests: int, shared: int, own: int) -> None:
        rng = np.random.default_rng(3)
        prefix = rng.integers(0, 96, shared)
        prompts = [np.concatenate([prefix, rng.integers(0, 96, own)]) for _ in range(requests)]
        engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
        computed = requests * (shared + own) - engine.prefix_statistics().hit_tokens
        self.avoided_of_shareable = (requests * (shared + own) - computed) / ((requests - 1) * shared)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    return load_model(
        write_random_llama(tmp_path_factory.mktemp("wide"), layers=1, hidden=16, max_position_embeddings=1024)
    )


@pytest.mark.parametrize("max_requests", [8, 24])
def test_most_of_a_shared_prefix_is_computed_once(wide_model, max_requests):
    engine = make_engine(wide_model, max_requests=max_requests, max_step_tokens=256, max_context=640)
    counted = Counted(engine, requests=24, shared=512, own=64)
    assert counted.avoided_of_shareable >= 0.85
    assert engine.stats().pages_in_use == 0


def test_a_request_waits_for_the_prefix_that_another_is_computing(wide_model):
    engine = make_engine(wide_model, max_requests=2, max_step_tokens=64, max_context=640)
    counted = Counted(engine, requests=2, shared=256, own=16)
    # All of it: the second began when the first had computed what both begin with.
    assert counted.avoided_of_shareable == 1


def test_forks_share_their_prompt_and_copy_one_page_each(prompt):
    engine = make_engine(golden_model("llama"), debug=True, prefix_cache=False)
    seeds = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(4)]
    expected = [engine.generate([prompt], params)[0].tokens for params in seeds]
    assert len(set(expected)) == 4
    batcher = engine.batcher()
    copied = engine.stats().copied_pages
    first = batcher.submit(prompt, seeds[0])
    requests = [first, *(batcher.fork(first, params) for params in seeds[1:])]
    tokens: dict[int, list[int]] = {request: [] for request in requests}
    pages = 0
    while batcher.has_unfinished:
        for output in batcher.step():
            tokens[output.request_id].append(output.token)
        pages = max(pages, engine.stats().pages_in_use)
    assert [tuple(tokens[request]) for request in requests] == expected
    assert engine.stats().copied_pages - copied == 3
    # Three whole pages of the prompt once; the partly filled one and the answer's own, four times.
    assert pages == 3 + 4 * 2


def test_a_fork_of_a_request_that_is_gone_is_refused_and_one_that_goes_later_is_not(prompt, cold):
    engine = make_engine(golden_model("llama"), debug=True)
    batcher = engine.batcher()
    first = batcher.submit(prompt, GREEDY)
    fork = batcher.fork(first, GREEDY)
    batcher.step()
    batcher.abort(first)
    tokens = []
    while batcher.has_unfinished:
        tokens += [output.token for output in batcher.step() if output.request_id == fork]
    assert tuple(tokens) == cold[52, GREEDY]
    with pytest.raises(kv_execution.batcher.RequestEndedError, match="has ended or never was"):
        batcher.fork(first, GREEDY)


def test_a_prefix_published_before_a_preemption_is_hit_after_it(prompt, cold):
    engine = make_engine(golden_model("llama"), max_step_tokens=16, debug=True)
    batcher = engine.batcher()
    request = batcher.submit(prompt, GREEDY)
    for _ in range(3):
        batcher.step()
    assert batcher.preempt(request)
    tokens, cached = [], 0
    while batcher.has_unfinished:
        for output in batcher.step():
            tokens.append(output.token)
            cached = output.cached_tokens
    assert tuple(tokens) == cold[52, GREEDY]
    assert cached >= 32


def test_a_deadline_ends_a_request_with_what_it_has():
    now = 0.0
    model = golden_model("llama")
    engine = PagedEngine(model, make_engine(model).config, clock=lambda: now)
    engine.init_paged_runtime()
    batcher = engine.batcher()
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    running, waiting = batcher.submit([1, 2], params, deadline_s=5), batcher.submit([3], params, deadline_s=0)
    ends = {}
    while batcher.has_unfinished:
        now += 1
        for output in batcher.step():
            if output.finish_reason:
                ends[output.request_id] = (output.finish_reason, output.token)
    assert ends == {running: ("deadline", None), waiting: ("deadline", None)}
    assert engine.stats().pages_in_use == engine.stats().running == engine.stats().waiting == 0


def test_a_full_queue_refuses_with_the_numbers():
    engine = make_engine(golden_model("llama"), max_waiting=2)
    batcher = engine.batcher()
    for _ in range(2):
        batcher.submit([1], GREEDY)
    with pytest.raises(kv_execution.engine.JaxkvError, match="2 requests wait and at most 2 may"):
        batcher.submit([1], GREEDY)
    batcher.step()
    batcher.submit([1], GREEDY)


def test_the_keys_of_a_prompt_are_those_that_its_pages_come_and_go_under(prompt):
    engine = make_engine(golden_model("llama"))
    assert engine.prefix_changes() == ([], [], True)
    engine.generate([prompt], GREEDY)
    keys = engine.prefix_keys(prompt)
    assert len(keys) == len(prompt) // engine.config.tokens_per_page
    assert engine.prefix_changes() == (keys, [], False)
    assert not set(keys) & set(engine.prefix_keys(prompt, cache_salt="other"))
    engine.reset_prefix_cache()
    assert engine.prefix_changes() == ([], keys, False)
    engine.init_paged_runtime()
    engine.generate([prompt], GREEDY)
    assert engine.prefix_changes() == (keys, [], True)


def test_the_keys_of_a_prompt_can_be_asked_for_in_the_middle_of_a_step(prompt, monkeypatch):
    engine = make_engine(golden_model("llama"))
    keys, asked, original = engine.prefix_keys(prompt), [], PagedRuntime.forward

    def forward(self, *arguments):
        asked.append(engine.prefix_keys(prompt))
        return original(self, *arguments)

    monkeypatch.setattr(PagedRuntime, "forward", forward)
    engine.generate([prompt], GREEDY)
    assert asked
    assert all(each == keys for each in asked)
