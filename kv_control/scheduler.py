"""Which tokens the next step computes: continuous batching under one token budget.

Rows that need one token go first, then prefill chunks, then requests admitted from the queue. Pages go by seniority:
when they run out the most junior request is preempted, which frees its pages and keeps its tokens, until the seniors
fit. The most senior request can therefore always go on, which bounds the steps of any workload. Who is admitted is up
to `admission`. Nothing changes where a step cannot be formed.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import KvStorageLayoutV1
from kv_control.admission import Admission, Granted
from kv_control.bursts import burst_steps
from kv_control.page_allocator import OutOfPagesError
from kv_control.prefix_trie import page_digest
from kv_control.queue import AGING_STEPS, QueuedRequest, Seniority, WaitingQueue
from kv_control.request_map import RequestHandle
from kv_control.residency import Residency
from kv_control.running import Int32Array, Int64Array
from kv_control.step_plan import StepPlan


class RequestTooLargeError(JaxkvError):
    """A request that could not run even alone."""


class QueueFullError(JaxkvError):
    """More requests wait than may."""


class UnknownRequestError(JaxkvError):
    """A request id that is neither waiting nor running."""


class Scheduler:
    """Owns the queue and, through `residency`, the running rows and their pages."""

    def __init__(
        self,
        layout: KvStorageLayoutV1,
        *,
        max_requests: int,
        max_step_tokens: int,
        max_context: int,
        max_waiting: int | None = None,
        reach: int | None = None,
        prefix_cache: bool = True,
        longest_prefix_first: bool = False,
        digest: Callable[[bytes], bytes] = page_digest,
    ) -> None:
        if max_step_tokens < max_requests:
            raise JaxkvError(
                f"max_step_tokens {max_step_tokens} is below max_requests {max_requests}, so a step could not give "
                f"every running request a token; raise the first or lower the second"
            )
        self.layout = layout
        self.residency = Residency(
            layout,
            max_requests=max_requests,
            max_context=max_context,
            max_step_tokens=max_step_tokens,
            reach=reach,
            prefix_cache=prefix_cache,
            digest=digest,
        )
        self.running = self.residency.running
        self._max_context = max_context
        self._max_step_tokens = max_step_tokens
        self._max_waiting = max_waiting
        self._waiting = WaitingQueue()
        self._admission = Admission(self.residency, self._waiting, longest_prefix_first=longest_prefix_first)
        self._arrivals = 0
        self._steps = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._waiting)

    def submit(
        self,
        request_id: int,
        token_ids: Int32Array,
        *,
        max_new_tokens: int,
        priority: int = 0,
        namespace: bytes = b"",
        read_cache: bool = True,
        parent: int | None = None,
    ) -> QueuedRequest:
        """Queue a request of `token_ids` [tokens] int32; what comes back says how long it may get.

        Raises RequestTooLargeError where the prompt fills the context or the pool could not hold the request alone, and
        QueueFullError.
        """
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait and at most {self._max_waiting} may; try again later"
            )
        request = self._new_request(request_id, token_ids, max_new_tokens, priority, namespace, read_cache, parent)
        self._waiting.push(request)
        return request

    def hold(
        self,
        request_id: int,
        token_ids: Int32Array,
        *,
        max_new_tokens: int,
        namespace: bytes = b"",
        read_cache: bool = True,
    ) -> RequestHandle:
        """Give a request a row at once; only `schedule_held` moves it, and it is never preempted. Without new tokens
        the prompt may fill the context.

        Raises what `submit` raises but QueueFullError, NoFreeRowError where no row is free, and OutOfPagesError where
        its prompt does not fit.
        """
        request = self._new_request(request_id, token_ids, max_new_tokens, 0, namespace, read_cache, None)
        share = self.residency.find(request, may_wait=False)
        assert share is not None
        try:
            needed = self.residency.pages_to_run(len(token_ids), share)
            fitted = self.residency.fitted(share, needed)
            if fitted is None:
                raise OutOfPagesError(needed, self.residency.room_beside(share.without_fork()))
            return self.residency.enter(request, fitted, held=True)
        finally:
            self.residency.forget(request_id)

    def schedule(self, *, may_preempt: bool = True, most_steps: int = 1) -> StepPlan | None:
        """The next step over queued and running requests, or None where none can be formed. Where all do nothing but
        decode and nobody waits it may be a burst of up to `most_steps`.

        Pass `may_preempt=False` while tokens of an earlier step are on the device: a request may only be preempted when
        all of its tokens are known. None then means that the step needs a preemption first.
        """
        preempted: list[int] = []
        in_the_way = self._admission.rows_in_the_way()
        if in_the_way.size and not may_preempt:
            return None
        preempted += [self._preempt(row) for row in in_the_way.tolist()]
        rows = self.running.by_seniority(np.flatnonzero(self.residency.request_map.live & ~self.running.held))
        want = self.running.kv_goal(rows) - self.running.kv_len[rows]
        steps = 1 if len(self._waiting) else burst_steps(self.residency, rows[want > 0], most_steps)
        if steps > 1:
            rows = rows[want > 0]
            return self._plan(rows, np.full(rows.size, steps), steps=steps)
        fitted = self._fit_pages(Granted(rows, self._within_budget(want)), preempted, may_preempt)
        if fitted is None:
            return None
        admitted: tuple[int, ...] = ()
        if len(fitted.rows) == len(rows) and len(self._waiting):
            entered = self._admission.admit(self._max_step_tokens - int(fitted.tokens.sum()), made_way=bool(preempted))
            admitted = tuple(entered.rows.tolist())
            fitted = Granted(*(np.concatenate(pair) for pair in zip(fitted, entered, strict=True)))
        active = fitted.tokens > 0
        if not active.any():
            return None
        rows, tokens = fitted.rows[active], fitted.tokens[active]
        single_first = np.argsort(tokens > 1, kind="stable")
        plan = self._plan(rows[single_first], tokens[single_first])
        return plan._replace(admitted=admitted, preempted=tuple(preempted))

    def schedule_held(self, rows: Int64Array) -> StepPlan:
        """The next step of the held `rows` [n], all of which have work. Raises OutOfPagesError, with nothing
        changed.
        """
        granted = self.next_held(rows)
        return self._plan(granted.rows, granted.tokens)

    def next_held(self, rows: Int64Array) -> Granted:
        """Those of the held `rows` [n] that the next step of them computes, and how many tokens of each."""
        tokens = self._within_budget(self.running.kv_goal(rows) - self.running.kv_len[rows])
        return Granted(rows[tokens > 0], tokens[tokens > 0])

    def retire(self, plan: StepPlan, token_ids: Int32Array) -> NDArray[np.bool_]:
        """Record the ids [steps, n] that a plan sampled; returns which of its rows [n] gained a token in each step.

        Rows that did not sample, and rows whose request ended while the step ran, gain none.
        """
        gained = plan.samples & self.residency.request_map.is_current(plan.rows, plan.epochs)
        self.running.record(plan.rows[gained], plan.positions[gained], token_ids[:, gained])
        self.residency.publish(plan.rows[gained])
        return gained

    def finish(self, request_id: int) -> None:
        """End a request in any state and free what it holds. Raises UnknownRequestError."""
        waited = self._waiting.remove(request_id) is not None
        if not self.residency.leave(request_id) and not waited:
            raise UnknownRequestError(f"request {request_id} is neither waiting nor running; it may have ended already")

    def preempt(self, request_id: int) -> bool:
        """Send a running request back to the queue; the host must know all its tokens. False where it does not run."""
        handle = self.residency.handle_of(request_id)
        if handle is None or self.running.held[handle.row]:
            return False
        self._preempt(handle.row)
        return True

    def _new_request(
        self,
        request_id: int,
        token_ids: Int32Array,
        max_new_tokens: int,
        priority: int,
        namespace: bytes,
        read_cache: bool,
        parent: int | None,
    ) -> QueuedRequest:
        tokens = len(token_ids)
        if tokens < 1:
            raise RequestTooLargeError("the prompt is empty; give at least one token")
        if tokens + (max_new_tokens > 0) > self._max_context:
            raise RequestTooLargeError(
                f"the prompt has {tokens} tokens and the context holds {self._max_context}"
                f"{', one of them for the answer' if max_new_tokens else ''}; shorten the prompt"
            )
        # The token that needs no K/V is the last of the answer, or one behind the prompt that is never sampled.
        total = min(tokens + max_new_tokens, self._max_context) if max_new_tokens else tokens + 1
        needed = self.residency.pages_to_run(total - 1)
        if needed > self.layout.usable_pages:
            raise RequestTooLargeError(
                f"{tokens} prompt tokens and {total - tokens if max_new_tokens else 0} new ones need {needed} pages of "
                f"{self.layout.tokens_per_page} tokens and the pool has {self.layout.usable_pages}; "
                "raise kv_pool_bytes or lower max_tokens"
            )
        self._arrivals += 1
        turn = (self._steps - priority * AGING_STEPS) * self._max_step_tokens + tokens
        seniority = Seniority(turn, self._arrivals)
        return QueuedRequest(
            request_id, token_ids, tokens, total, priority, seniority, namespace, read_cache=read_cache, parent=parent
        )

    def _within_budget(self, want: Int64Array) -> Int64Array:
        """Tokens granted [n] of those wanted [n]: single tokens first, then in the order given."""
        single = want == 1
        if single.all():
            return want
        left = self._max_step_tokens - int(single.sum())
        chunks = np.where(single, 0, want)
        before = np.cumsum(chunks) - chunks
        return np.where(single, 1, np.clip(left - before, 0, chunks))

    def _fit_pages(self, granted: Granted, preempted: list[int], may_preempt: bool) -> Granted | None:
        """Cut or preempt from the junior end until the pages suffice; None where it has to preempt and may not, or
        where not even that leaves anything to compute.
        """
        rows, tokens = granted
        need = self.residency.pages_needed(rows, tokens)
        if int(need.sum()) <= self.residency.obtainable_pages:
            return granted
        # What each row can have once those before it have what they need and those behind it are gone.
        room = self.residency.obtainable_pages - (np.cumsum(need) - need)
        room[:-1] += self.residency.pages_gained(rows[:0:-1])[::-1]
        last = int(np.flatnonzero(room >= 0)[-1])
        pages = int(self.residency.request_map.page_count[rows[last]] + room[last])
        most = pages * self.layout.tokens_per_page - int(self.running.kv_len[rows[last]])
        tokens[last] = min(int(tokens[last]), most)
        fitted = Granted(rows[: last + 1], tokens[: last + 1])
        if last + 1 < len(rows):
            if not may_preempt or not fitted.tokens.any():
                return None
            preempted += [self._preempt(row) for row in rows[:last:-1].tolist()]
        return fitted

    def _preempt(self, row: int) -> int:
        request = self.running.requeued(row)
        self.residency.leave(request.request_id)
        self._waiting.push(request)
        return request.request_id

    def _plan(self, rows: Int64Array, tokens: Int64Array, steps: int = 1) -> StepPlan:
        running = self.running
        pages = self.residency.advance(rows, tokens)
        self.residency.publish(rows)
        self.residency.give_back(rows)
        self._steps += steps
        positions = running.kv_len[rows] - (steps - 1)
        samples = positions == running.num_tokens[rows]
        running.num_tokens[rows] += steps * samples
        return StepPlan(
            rows=rows,
            epochs=self.residency.request_map.epoch[rows],
            request_ids=running.request_id[rows],
            positions=positions,
            samples=samples,
            token_rows=np.repeat(rows, tokens),
            table=pages.table,
            scrub_pages=pages.scrub_pages,
            copy_sources=pages.copy_sources,
            copy_targets=pages.copy_targets,
            admitted=(),
            preempted=(),
            steps=steps,
        )
