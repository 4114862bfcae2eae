"""Any life of a scheduler keeps its pages, its tokens and its word: a state machine over all that can be done to it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_driver import SchedulerDriver, prompt_of

from kv_control.page_allocator import OutOfPagesError
from kv_control.prefix_trie import page_digest
from kv_control.request_map import NoFreeRowError
from kv_control.scheduler import QueueFullError

MAX_WAITING = 6
PROMPTS = st.builds(prompt_of, st.integers(1, 26), st.integers(0, 2))
NEW_TOKENS = st.integers(1, 10)
PRIORITIES = st.integers(-1, 1)


class SchedulerLife(RuleBasedStateMachine):
    """Submit, fork, hold, step, abort, preempt, forget the cache: in any order, in too small a pool."""

    @initialize(
        usable_pages=st.integers(9, 16),
        max_step_tokens=st.integers(3, 12),
        prefix_cache=st.sampled_from([True, True, True, False]),
        longest_prefix_first=st.booleans(),
        reach=st.sampled_from([None, None, 1, 4, 6]),
        most_steps=st.sampled_from([1, 1, 2, 3, 8]),
        digest=st.sampled_from([page_digest, page_digest, lambda data: b"same", lambda data: bytes([sum(data) % 3])]),
    )
    def begin(self, usable_pages, reach, **options):
        if reach is not None:
            usable_pages = max(usable_pages - 3, 7)  # too small for some requests, but for what they give back
        self.driver = SchedulerDriver(
            max_requests=3, max_context=40, max_waiting=MAX_WAITING, usable_pages=usable_pages, reach=reach, **options
        )
        self.held_new_tokens = {}

    def _queue(self, submit, *args, **options):
        if self.driver.scheduler.num_waiting < MAX_WAITING:
            submit(*args, **options)
            return
        before = self.driver.books()
        with pytest.raises(QueueFullError):
            submit(*args, **options)
        assert self.driver.books() == before

    def _some(self, data, request_ids):
        return data.draw(st.sampled_from(sorted(request_ids)))

    @rule(
        prompt=PROMPTS,
        new_tokens=NEW_TOKENS,
        stops_after=st.integers(1, 10),
        priority=PRIORITIES,
        namespace=st.sampled_from([b"", b"", b"a"]),
        read_cache=st.sampled_from([True, True, False]),
    )
    def submit(self, prompt, new_tokens, stops_after, **options):
        self._queue(self.driver.submit, prompt, new_tokens, ends_at=len(prompt) + stops_after, **options)

    @precondition(lambda self: self.driver.unfinished)
    @rule(data=st.data(), new_tokens=NEW_TOKENS, priority=PRIORITIES)
    def fork(self, data, new_tokens, priority):
        self._queue(self.driver.fork, self._some(data, self.driver.unfinished), new_tokens, priority=priority)

    @precondition(lambda self: len(self.driver.held) < 2)
    @rule(prompt=PROMPTS, new_tokens=NEW_TOKENS)
    def hold(self, prompt, new_tokens):
        before = self.driver.books()
        try:
            self.held_new_tokens[self.driver.hold(prompt, new_tokens)] = new_tokens
        except (NoFreeRowError, OutOfPagesError):
            assert self.driver.books() == before

    @precondition(lambda self: self.driver.held)
    @rule()
    def step_held(self):
        going = [r for r in sorted(self.driver.held) if len(self.driver.answers[r]) < self.held_new_tokens[r]]
        before = self.driver.books()
        try:
            if going:
                self.driver.step_held(going)
        except OutOfPagesError:
            assert self.driver.books() == before

    @precondition(lambda self: self.driver.held)
    @rule(data=st.data())
    def release(self, data):
        self.driver.end(self._some(data, self.driver.held))

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self.driver.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        self.driver.end(self._some(data, self.driver.unfinished))

    @precondition(lambda self: self.driver.unfinished)
    @rule(data=st.data())
    def preempt(self, data):
        self.driver.drain()
        if self.driver.unfinished:
            self.driver.preempt(self._some(data, self.driver.unfinished))

    @rule()
    def reset_prefix_cache(self):
        self.driver.reset_prefix_cache()

    def teardown(self):
        if hasattr(self, "driver"):
            for request_id in sorted(self.driver.held):
                self.driver.end(request_id)
            self.driver.run()
            self.driver.assert_nothing_left()


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(max_examples=100, stateful_step_count=40)
