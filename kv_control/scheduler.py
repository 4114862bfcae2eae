"""Which tokens the next step computes: continuous batching under one token budget.

Rows that need one token go first, then prefill chunks, then requests admitted from the queue. Pages go by seniority
(priority, then arrival): when they run out the most junior request is preempted, which frees its pages and keeps its
tokens, until the seniors fit. The most senior request can therefore always go on, which bounds the number of steps of
any workload. A request is admitted only where pages for all its tokens are free beyond those that running rows still
have to take, so it does not push out at once what was admitted before it. Nothing changes where a step cannot be
formed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1
from kv_control.page_allocator import OutOfPagesError, PageAllocator
from kv_control.queue import QueuedRequest, WaitingQueue
from kv_control.request_map import RequestHandle, RequestMap
from kv_control.running import Int32Array, Int64Array, RunningRequests
from kv_control.step_builder import StepBuilder


class RequestTooLargeError(JaxkvError):
    """A request that could not run even alone."""


class UnknownRequestError(JaxkvError):
    """A request id that is neither waiting nor running."""


class StepPlan(NamedTuple):
    """One step: what to compute, and which rows sample a token at its end.

    rows, epochs, request_ids, positions, samples: [n] in the order of `table`; `positions` is the index that the
    row's next token will have in its sequence. token_ids, token_rows: [tokens], ids being ON_DEVICE where only the
    device knows them.
    """

    rows: Int64Array
    epochs: Int64Array
    request_ids: Int64Array
    positions: Int64Array
    samples: NDArray[np.bool_]
    token_ids: Int32Array
    token_rows: Int64Array
    table: KvPageTableV1
    scrub_pages: Int32Array
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]


class Scheduler:
    """Owns the queue, the running rows, and through the step builder the pages and the request map."""

    def __init__(self, layout: KvStorageLayoutV1, *, max_requests: int, max_step_tokens: int, max_context: int) -> None:
        if max_step_tokens < max_requests:
            raise JaxkvError(
                f"max_step_tokens {max_step_tokens} is below max_requests {max_requests}, so a step could not give "
                f"every running request a token; raise the first or lower the second"
            )
        self.layout = layout
        self.max_context = max_context
        self.max_step_tokens = max_step_tokens
        self.allocator = PageAllocator(layout.num_pages)
        self.request_map = RequestMap(max_requests, layout.pages_for(max_context))
        self.running = RunningRequests(max_requests, max_context)
        self._builder = StepBuilder(layout, self.allocator, self.request_map)
        self._waiting = WaitingQueue()
        self._handles: dict[int, RequestHandle] = {}
        self._arrivals = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._handles)

    def submit(
        self, request_id: int, token_ids: Int32Array, *, max_new_tokens: int, priority: int = 0
    ) -> QueuedRequest:
        """Queue a request of `token_ids` [tokens] int32; what comes back says how long it may get.

        Raises RequestTooLargeError where the prompt fills the context or the pool could not hold the request alone.
        """
        request = self._new_request(request_id, token_ids, max_new_tokens, priority)
        self._waiting.push(request)
        return request

    def hold(self, request_id: int, token_ids: Int32Array, *, max_new_tokens: int) -> RequestHandle:
        """Give a request a row at once; only `schedule_held` moves it, and it is never preempted.

        Raises what `submit` raises, NoFreeRowError where no row is free, and OutOfPagesError where its prompt does
        not fit.
        """
        request = self._new_request(request_id, token_ids, max_new_tokens, 0)
        needed = self.layout.pages_for(len(token_ids))
        if needed > self.allocator.free_pages:
            raise OutOfPagesError(needed, self.allocator.free_pages)
        return self._start(request, held=True)

    def schedule(self, *, may_preempt: bool = True) -> StepPlan | None:
        """The next step over queued and running requests, or None where none can be formed.

        Pass `may_preempt=False` while tokens of an earlier step are on the device: a request may only be preempted
        when all of its tokens are known. None then means that the step needs a preemption first.
        """
        running = self.running
        rows = running.by_seniority(np.flatnonzero(self.request_map.live & ~running.held))
        want = running.kv_goal(rows) - running.kv_len[rows]
        grant = self._within_budget(want)
        fitted = self._fit_pages(rows, grant, may_preempt)
        if fitted is None:
            return None
        rows, grant, preempted = fitted
        admitted: tuple[int, ...] = ()
        if not preempted and len(self._waiting):
            rows, grant, admitted = self._admit(rows, grant)
        active = grant > 0
        if not active.any():
            return None
        rows, grant = rows[active], grant[active]
        decodes_first = np.argsort(grant > 1, kind="stable")
        return self._plan(rows[decodes_first], grant[decodes_first], admitted, preempted)

    def schedule_held(self, rows: Int64Array) -> StepPlan:
        """The next step of the held `rows` [n], all of which have work. Raises OutOfPagesError, with nothing
        changed.
        """
        want = self.running.kv_goal(rows) - self.running.kv_len[rows]
        grant = self._within_budget(want)
        return self._plan(rows[grant > 0], grant[grant > 0], (), ())

    def retire(self, plan: StepPlan, token_ids: Int32Array) -> NDArray[np.bool_]:
        """Record the ids [n] that a step sampled; returns which rows [n] of the plan gained a token.

        Rows that did not sample, and rows whose request ended while the step ran, gain none.
        """
        gained = plan.samples & self.request_map.is_current(plan.rows, plan.epochs)
        self.running.record(plan.rows[gained], plan.positions[gained], token_ids[gained])
        return gained

    def finish(self, request_id: int) -> None:
        """End a request in any state and free what it holds. Raises UnknownRequestError."""
        if self._waiting.remove(request_id) is not None:
            return
        handle = self._handles.pop(request_id, None)
        if handle is None:
            raise UnknownRequestError(
                f"request {request_id} is neither waiting nor running; it may have finished already"
            )
        self._builder.release_request(handle)

    def preempt(self, request_id: int) -> bool:
        """Send a running request back to the queue with its tokens, all of which the host must know; False where it
        does not run.
        """
        handle = self._handles.get(request_id)
        if handle is None or self.running.held[handle.row]:
            return False
        self._preempt(handle.row)
        return True

    def check_invariants(self) -> None:
        """Raises InvariantError where pages, references or the dirty set disagree with what the rows hold."""
        holders = self.request_map.holders(self.layout.num_pages)
        self.allocator.check_invariants(holders)
        self.allocator.require_clean(np.flatnonzero(holders))

    def _new_request(self, request_id: int, token_ids: Int32Array, max_new_tokens: int, priority: int) -> QueuedRequest:
        tokens = len(token_ids)
        if tokens < 1:
            raise RequestTooLargeError("the prompt is empty; give at least one token")
        if tokens >= self.max_context:
            raise RequestTooLargeError(
                f"the prompt has {tokens} tokens and the context holds {self.max_context}, one of them for the answer; "
                f"shorten the prompt"
            )
        total = min(tokens + max_new_tokens, self.max_context)
        needed = self.layout.pages_for(total - 1)
        if needed > self.layout.usable_pages:
            raise RequestTooLargeError(
                f"{tokens} prompt tokens and {total - tokens} new ones need {needed} pages of "
                f"{self.layout.tokens_per_page} tokens and the pool has {self.layout.usable_pages}; "
                "raise kv_pool_bytes or lower max_tokens"
            )
        self._arrivals += 1
        return QueuedRequest(request_id, token_ids, tokens, total, priority, self._arrivals)

    def _start(self, request: QueuedRequest, *, held: bool) -> RequestHandle:
        handle = self.request_map.open(request.request_id)
        self.running.start(handle.row, request, held=held)
        self._handles[request.request_id] = handle
        return handle

    def _within_budget(self, want: Int64Array) -> Int64Array:
        """Tokens granted [n] of those wanted [n]: single tokens first, then in the order given."""
        single = want == 1
        left = self.max_step_tokens - int(single.sum())
        chunks = np.where(single, 0, want)
        before = np.cumsum(chunks) - chunks
        return np.where(single, 1, np.clip(left - before, 0, chunks))

    def _pages_needed(self, rows: Int64Array, grant: Int64Array) -> Int64Array:
        """New pages [n] that `rows` [n] take when they compute `grant` [n] more tokens."""
        pages = -(-(self.running.kv_len[rows] + grant) // self.layout.tokens_per_page)
        return pages - self.request_map.page_count[rows]

    def _fit_pages(
        self, rows: Int64Array, grant: Int64Array, may_preempt: bool
    ) -> tuple[Int64Array, Int64Array, tuple[int, ...]] | None:
        """Cut or preempt from the junior end until the pages suffice; None where that needs a preemption that may not
        happen.
        """
        preempted: list[int] = []
        while len(rows):
            need = self._pages_needed(rows, grant)
            spare = self.allocator.free_pages - int(need.sum())
            if spare >= 0:
                break
            last = rows[-1]
            for_last = spare + int(need[-1])
            if for_last >= 0:
                room = (int(self.request_map.page_count[last]) + for_last) * self.layout.tokens_per_page
                grant[-1] = min(int(grant[-1]), room - int(self.running.kv_len[last]))
                break
            if not may_preempt:
                return None
            preempted.append(self._preempt(int(last)))
            rows, grant = rows[:-1], grant[:-1]
        return rows, grant, tuple(preempted)

    def _preempt(self, row: int) -> int:
        request = self.running.requeued(row)
        self._builder.release_request(self._handles.pop(request.request_id))
        self._waiting.push(request)
        return request.request_id

    def _admit(self, rows: Int64Array, grant: Int64Array) -> tuple[Int64Array, Int64Array, tuple[int, ...]]:
        budget = self.max_step_tokens - int(grant.sum())
        goal = self.running.kv_goal(rows)
        spare = self.allocator.free_pages - int(self._pages_needed(rows, goal - self.running.kv_len[rows]).sum())
        new_rows: list[int] = []
        new_grant: list[int] = []
        while budget > 0 and self.request_map.free_rows:
            request = self._waiting.peek()
            if request is None:
                break
            tokens = len(request.token_ids)
            # One token beyond what is there, so that a preempted request gets further than it was before.
            needed = self.layout.pages_for(min(tokens + 1, request.max_tokens_total - 1))
            if needed > spare:
                break
            new_rows.append(self._start(self._waiting.pop(), held=False).row)
            new_grant.append(min(tokens, budget))
            budget -= new_grant[-1]
            spare -= needed
        admitted = np.asarray(new_rows, np.int64)
        return (
            np.concatenate([rows, admitted]),
            np.concatenate([grant, np.asarray(new_grant, np.int64)]),
            tuple(new_rows),
        )

    def _plan(
        self, rows: Int64Array, grant: Int64Array, admitted: tuple[int, ...], preempted: tuple[int, ...]
    ) -> StepPlan:
        running = self.running
        kv_len = running.kv_len[rows]
        reservation = self._builder.reserve(rows, kv_len, grant)
        # The step clears these pages before it writes to any of them, so they count as clean from here on.
        self._builder.confirm(reservation)
        table = self._builder.build(rows, kv_len, grant)
        running.kv_len[rows] = kv_len + grant
        samples = running.kv_len[rows] == running.num_tokens[rows]
        running.num_tokens[rows] += samples
        token_rows = np.repeat(rows, grant)
        return StepPlan(
            rows=rows,
            epochs=self.request_map.epoch[rows],
            request_ids=running.request_id[rows],
            positions=kv_len + grant,
            samples=samples,
            token_ids=running.token_ids(token_rows, table.positions.astype(np.int64)),
            token_rows=token_rows,
            table=table,
            scrub_pages=reservation.dirty,
            admitted=admitted,
            preempted=preempted,
        )
