"""A scheduler driven as the batcher drives it, one step always in flight, on a device that is an array.

What a slot should hold depends on the namespace and on every token up to it, as K/V does, and the next token depends on
what the row's last slot holds. So a page that is shared, kept or read wrongly is seen by its content, and free pages
are made unreadable after every step.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from kv_common.layout import KvStorageLayoutV1
from kv_control.scheduler import Scheduler
from kv_control.step_plan import StepPlan

PAGE = 4
VOCABULARY = 97
CLEARED = -1
UNREADABLE = -2


@dataclass
class Expected:
    """What a request is due: its tokens, the generated ones included, and what the slot of each should hold."""

    tokens: np.ndarray
    content: np.ndarray
    prompt_len: int
    ends_at: int
    namespace: bytes

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len : self.ends_at].tolist()


def expected_of(prompt, max_new_tokens, *, namespace=b"", ends_at=None) -> Expected:
    """What a request alone on an endless device would give; it ends at `ends_at` tokens, where a stop token is."""
    tokens, content, state = list(map(int, prompt)), [], crc32(namespace)
    total = len(tokens) + max_new_tokens
    for position in range(total):
        if position == len(tokens):
            tokens.append(state % VOCABULARY)
        state = (state * 6364136223846793005 + tokens[position] + 1) % 2**61
        content.append(state)
    return Expected(np.array(tokens, np.int32), np.array(content), len(prompt), min(total, ends_at or total), namespace)


class SchedulerDriver:
    """Submits, steps and collects; every step is checked against `expected`, and the books after it."""

    def __init__(self, *, usable_pages, max_requests=4, max_step_tokens=16, max_context=64, most_steps=1, **options):
        layout = KvStorageLayoutV1(
            num_layers=1, num_kv_heads=1, head_dim=1, tokens_per_page=PAGE, num_pages=usable_pages + 1
        )
        self.scheduler = Scheduler(
            layout,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            max_context=max_context,
            **options,
        )
        self.residency = self.scheduler.residency
        self.allocator = self.residency.allocator
        self.running = self.scheduler.running
        self.max_step_tokens = max_step_tokens
        self.most_steps = most_steps
        self.content = np.full((usable_pages + 1, PAGE), CLEARED, np.int64)
        self.expected: dict[int, Expected] = {}
        self.unfinished: set[int] = set()
        self.held: set[int] = set()
        self.answers: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.steps = 0
        self.first_step: dict[int, int] = {}
        self.admissions: list[int] = []
        self.preemptions: list[int] = []
        # Per request, how many others had left by each of its preemptions, at an end or preempted.
        self.left_before: dict[int, list[int]] = {}
        self.computed: Counter[int] = Counter()
        self._ids = itertools.count()
        self._in_flight: tuple[StepPlan, np.ndarray] | None = None

    @property
    def free_pages(self) -> int:
        return self.allocator.free_pages

    def is_running(self, request_id) -> bool:
        return self.residency.handle_of(request_id) is not None

    def row_of(self, request_id) -> int:
        return self.residency.handle_of(request_id).row

    def pages_of(self, request_id) -> list[int]:
        return self.residency.request_map.pages_of(self.row_of(request_id)).tolist()

    def kv_len(self, request_id) -> int:
        return int(self.running.kv_len[self.row_of(request_id)])

    def books(self):
        """Everything that a refusal must leave alone."""
        return (
            self.allocator.reference_count.tolist(),
            self.allocator.cached.tolist(),
            self.allocator.dirty.tolist(),
            self.residency.request_map.table.tolist(),
            self.running.kv_len[self.residency.request_map.live].tolist(),
            self.scheduler.num_waiting,
            self.residency.num_running,
        )

    def submit(self, prompt, max_new_tokens=4, *, ends_at=None, namespace=b"", **options) -> int:
        request_id = next(self._ids)
        tokens = np.array(prompt, np.int32)
        self.scheduler.submit(request_id, tokens, max_new_tokens=max_new_tokens, namespace=namespace, **options)
        self.expected[request_id] = expected_of(tokens, max_new_tokens, namespace=namespace, ends_at=ends_at)
        self.unfinished.add(request_id)
        return request_id

    def fork(self, request_id, max_new_tokens=4, **options) -> int:
        parent = self.expected[request_id]
        prompt = parent.tokens[: parent.prompt_len]
        return self.submit(prompt, max_new_tokens, parent=request_id, namespace=parent.namespace, **options)

    def hold(self, prompt, max_new_tokens=4) -> int:
        request_id = next(self._ids)
        tokens = np.array(prompt, np.int32)
        self.scheduler.hold(request_id, tokens, max_new_tokens=max_new_tokens)
        self.expected[request_id] = expected_of(tokens, max_new_tokens)
        self.answers[request_id] = []
        self.held.add(request_id)
        return request_id

    def step(self) -> StepPlan | None:
        """Start the next step and collect the one before it. Fails where nothing can ever go on."""
        previous, self._in_flight = self._in_flight, None
        before = self.books()
        plan = self.scheduler.schedule(may_preempt=previous is None, most_steps=self.most_steps)
        if plan is None:
            assert self.books() == before, "no step was formed, and yet something changed"
        else:
            chunks = np.diff(plan.table.query_start) > plan.steps
            assert not (chunks[:-1] & ~chunks[1:]).any(), "a prefill chunk goes before a decode"
            self._in_flight = plan, self._run(plan)
        if previous is not None:
            self._collect(previous)
        elif plan is None and not self.held:
            assert not self.unfinished, f"nothing runs and {self.scheduler.num_waiting} requests wait"
        self.steps += 1
        self.check()
        return plan

    def step_held(self, request_ids) -> StepPlan:
        plan = self.scheduler.schedule_held(np.array([self.row_of(request_id) for request_id in request_ids]))
        self._collect((plan, self._run(plan)))
        self.check()
        return plan

    def drain(self) -> None:
        """Collect what is in flight."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            self._collect(in_flight)

    def steps_at_most(self) -> int:
        """As many as it takes to run what is unfinished one after the other, each step followed by an empty one."""
        return 8 + 2 * sum(
            self.expected[request_id].ends_at + len(self.expected[request_id].tokens) // self.max_step_tokens
            for request_id in self.unfinished
        )

    def run(self, *request_ids, at_most=None) -> int:
        """Step until these have ended, or all; returns the steps taken."""
        awaited, at_most = set(request_ids) or set(self.unfinished), at_most or self.steps_at_most()
        for taken in range(at_most):
            if awaited.isdisjoint(self.unfinished):
                return taken
            self.step()
        assert awaited.isdisjoint(self.unfinished), f"{awaited & self.unfinished} unfinished after {at_most} steps"
        return at_most

    def step_until(self, condition, at_most=100) -> None:
        for _ in range(at_most):
            if condition():
                return
            self.step()
        assert condition(), f"not so after {at_most} steps"

    def end(self, request_id) -> None:
        """Abort, or release what is held."""
        self.scheduler.finish(request_id)
        self.unfinished.discard(request_id)
        self.held.discard(request_id)
        if not self.unfinished:
            self._in_flight = None
        self.check()

    def preempt(self, request_id) -> bool:
        self.drain()
        done = self.scheduler.preempt(request_id)
        self._note_preempted([request_id] * done)
        self.check()
        return done

    def reset_prefix_cache(self) -> None:
        self.residency.trie.reset()
        self.check()

    def check(self) -> None:
        self.residency.check_invariants()

    def assert_nothing_left(self) -> None:
        """No request is left, nor a trace of one, and all pages are free but for what the cache keeps."""
        scheduler, usable = self.scheduler, len(self.content) - 1
        assert not self.unfinished
        assert not self.held
        assert (scheduler.num_waiting, self.residency.num_running, self.allocator.live_pages) == (0, 0, 0)
        assert self.residency.request_map.free_rows == self.residency.request_map.max_requests
        assert not self.residency._waiting_keys
        assert not self.residency._forks
        assert not self.residency.trie.pending._owner_of
        assert not self.residency.trie.pending._keys_of
        self.reset_prefix_cache()
        assert self.free_pages == usable

    def _run(self, plan: StepPlan) -> np.ndarray:
        """Play the device: clear, copy, write, read; returns the tokens [steps, n] that it samples."""
        table = plan.table
        table.validate(len(self.content), reach=self.residency.reach)
        self._note(plan)
        self.content[plan.scrub_pages] = CLEARED
        self.content[plan.copy_targets] = self.content[plan.copy_sources]
        due = [self.expected[request_id] for request_id in plan.request_ids.tolist()]
        starts = plan.table.kv_len - np.diff(table.query_start)
        written = [row.content[start:end] for row, start, end in zip(due, starts, table.kv_len, strict=True)]
        self.content.reshape(-1)[table.write_slots] = np.concatenate(written)
        assert (self.content[table.page_ids] != UNREADABLE).all(), "a page was not cleared"
        sampled = np.full((plan.steps, table.rows), UNREADABLE, np.int32)
        oldest_seen = starts - (starts if self.residency.reach is None else self.residency.reach - 1)
        for index, row in enumerate(due):
            pages = table.page_ids[table.page_indptr[index] : table.page_indptr[index + 1]]
            kv_len = table.kv_len[index]
            seen = slice(max(oldest_seen[index], 0), kv_len)
            read = self.content[pages].reshape(-1)[seen]
            assert np.array_equal(read, row.content[seen]), f"request {plan.request_ids[index]} reads wrong K/V"
            if plan.samples[index]:
                sampled[:, index] = read[-plan.steps :] % VOCABULARY
        self.content[self.allocator.dirty & (self.allocator.reference_count == 0)] = UNREADABLE
        return sampled

    def _note(self, plan: StepPlan) -> None:
        tokens = np.diff(plan.table.query_start)
        assert plan.table.tokens <= self.max_step_tokens * plan.steps
        if plan.steps > 1:
            assert plan.steps <= self.most_steps
            assert (tokens == plan.steps).all()
            assert plan.samples.all()
            assert not self.scheduler.num_waiting
            assert not plan.admitted
            assert not plan.preempted
            assert len(plan.scrub_pages) <= plan.table.rows, "a step's shape has room for a page a row"
        assert plan.token_rows.tolist() == np.repeat(plan.rows, tokens).tolist()
        self.plans.append(plan)
        self._note_preempted(plan.preempted)
        for request_id, count in zip(plan.request_ids.tolist(), tokens.tolist(), strict=True):
            self.computed[request_id] += count
        for row in plan.admitted:
            request_id = int(self.running.request_id[row])
            self.admissions.append(request_id)
            self.first_step.setdefault(request_id, len(self.plans) - 1)

    def _note_preempted(self, request_ids) -> None:
        for request_id in request_ids:
            left = [*self.preemptions, *(self.expected.keys() - self.unfinished)]
            self.left_before.setdefault(request_id, []).append(len(left) - left.count(request_id))
            self.preemptions.append(request_id)

    def _collect(self, step: tuple[StepPlan, np.ndarray]) -> None:
        plan, sampled = step
        gained = self.scheduler.retire(plan, sampled)
        for step, index in itertools.product(range(plan.steps), np.flatnonzero(gained).tolist()):
            request_id, position = int(plan.request_ids[index]), int(plan.positions[index]) + step
            if request_id not in self.unfinished | self.held:
                continue  # it ended earlier in the burst
            expected = self.expected[request_id]
            assert sampled[step, index] == expected.tokens[position], f"request {request_id} got a wrong token"
            answer = self.answers.setdefault(request_id, [])
            answer.append(int(sampled[step, index]))
            assert len(answer) == position + 1 - expected.prompt_len, f"request {request_id} got a token twice"
            if position + 1 == expected.ends_at and request_id in self.unfinished:
                assert answer == expected.answer
                self.end(request_id)


def prompt_of(tokens: int, seed: int = 0) -> np.ndarray:
    """A prompt that shares no token sequence with those of other seeds; the shorter is the start of the longer."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens, np.int32)
