"""Any life of an engine keeps its pages and its tokens: a state machine over everything that a user can do to it."""

import itertools
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from engine_case import golden_model, golden_prompts, make_engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv_execution import PagedEngine, SamplingParams
from kv_execution.batcher import Batcher, RequestEndedError

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
PARAMS = (GREEDY, replace(GREEDY, temperature=1.2, top_p=0.9, seed=3))


def prompts() -> list[np.ndarray]:
    """Some that share pages, some that share part of a page, some that share nothing."""
    base = golden_prompts("llama")[2]
    return [*golden_prompts("llama")[:3], base[:16], base[:24], np.append(base[:17], 9), np.arange(40, 65)]


class EngineLife(RuleBasedStateMachine):
    """Submit, fork, step, abort, preempt, run out of time, forget the cache: in any order, in too small a pool."""

    engine: ClassVar[PagedEngine]
    expected: ClassVar[dict[tuple[int, int], tuple[int, ...]]]
    submitted: ClassVar[itertools.count]
    now: ClassVar[float] = 0.0

    @classmethod
    def prepare(cls) -> None:
        """What every request yields when it runs alone, and an engine with a clock that only this machine moves."""
        alone = make_engine(golden_model("llama"), prefix_cache=False)
        cls.expected = {
            (prompt, params): alone.generate([tokens], PARAMS[params])[0].tokens
            for prompt, tokens in enumerate(prompts())
            for params in range(2)
        }
        small = make_engine(
            golden_model("llama"), pages=13, tokens_per_page=8, max_requests=4, max_step_tokens=16, debug=True
        )
        cls.engine = PagedEngine(small.model, small.config, clock=lambda: cls.now)
        cls.submitted = itertools.count()

    @initialize(longest_prefix_first=st.booleans())
    def begin(self, longest_prefix_first):
        self.engine.init_paged_runtime()
        self.engine._runtime.scheduler._longest_prefix_first = longest_prefix_first
        self.batcher: Batcher = self.engine.batcher()
        self.kind: dict[int, tuple[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.live: list[int] = []

    @rule(
        prompt=st.integers(0, 6),
        params=st.integers(0, 1),
        max_tokens=st.integers(1, MAX_TOKENS),
        count=st.integers(1, 8),
        priority=st.integers(0, 2),
        deadline_s=st.one_of(st.none(), st.integers(1, 30)),
        salt=st.sampled_from(["", "", "other"]),
        read_cache=st.booleans(),
    )
    def submit(self, prompt, params, max_tokens, count, priority, deadline_s, salt, read_cache):
        for _ in range(count):
            request = self.batcher.submit(
                prompts()[prompt],
                replace(PARAMS[params], max_tokens=max_tokens),
                priority=priority,
                deadline_s=deadline_s,
                cache_salt=salt,
                read_cache=read_cache,
            )
            self.begun(request, (prompt, params))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), params=st.integers(0, 1), count=st.integers(1, 5))
    def fork(self, which, params, count):
        parent = self.live[which % len(self.live)]
        for _ in range(count):
            try:
                request = self.batcher.fork(parent, PARAMS[params])
            except RequestEndedError:
                return  # its last token waits to be delivered
            self.begun(request, (self.kind[parent][0], params))

    def begun(self, request, kind):
        next(EngineLife.submitted)
        self.kind[request], self.tokens[request] = kind, []
        self.live.append(request)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if not self.batcher.has_unfinished:
                break
            EngineLife.now += 1
            self.take(self.batcher.step())

    def take(self, outputs):
        for output in outputs:
            if output.token is not None:
                self.tokens[output.request_id].append(output.token)
            if output.finish_reason is not None:
                self.ended(output.request_id)

    def ended(self, request):
        got = tuple(self.tokens[request])
        assert got == self.expected[self.kind[request]][: len(got)]
        self.live.remove(request)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        request = self.live[which % len(self.live)]
        if self.batcher.abort(request):
            self.ended(request)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def preempt(self, which):
        self.batcher.preempt(self.live[which % len(self.live)])

    @rule()
    def forget_the_cache(self):
        self.engine.reset_prefix_cache()

    @invariant()
    def pages_add_up(self):
        if hasattr(self, "batcher"):
            self.engine._runtime.scheduler.residency.check_invariants()
            stats = self.engine.stats()
            total = stats.free_pages + stats.pages_in_use + stats.cached_pages
            assert total == self.engine.describe().layout.usable_pages

    def teardown(self):
        if not hasattr(self, "batcher"):
            return
        for _ in range(4000):
            if not self.batcher.has_unfinished:
                break
            self.take(self.batcher.step())
        assert not self.batcher.has_unfinished
        assert self.live == []
        stats = self.engine.stats()
        assert (stats.pages_in_use, stats.running, stats.waiting) == (0, 0, 0)
        self.engine.reset_prefix_cache()
        assert self.engine.stats().free_pages == self.engine.describe().layout.usable_pages


@pytest.mark.parametrize(
    ("examples", "requests"),
    [(20, 300), pytest.param(265, 5000, marks=pytest.mark.slow)],
)
def test_any_life_of_an_engine_keeps_its_pages_and_its_tokens(examples, requests):
    EngineLife.prepare()
    run = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        # How many requests so few examples have is else up to chance.
        derandomize=examples < 100 or settings.default.derandomize,
    )
    run_state_machine_as_test(EngineLife, settings=run)
    assert next(EngineLife.submitted) >= requests


def test_logprobs_come_to_those_who_ask_and_change_no_token():
    engine = make_engine(golden_model("llama"))
    plain, asking = SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, logprobs=True)
    alone = engine.generate([[5, 6, 7]], plain)[0]
    first, second = engine.generate([[5, 6, 7], [5, 6, 7]], [plain, asking])
    assert first.tokens == second.tokens == alone.tokens
    assert first.logprobs == first.top_logprobs == alone.logprobs == ()
    assert len(second.logprobs) == len(second.tokens)
    assert all(logprob <= 0 for logprob in second.logprobs)
