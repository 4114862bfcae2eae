"""Who comes in from the queue, and who has to make way.

A request is admitted only where pages for all its tokens can be had beyond those that running rows still have to take,
and may push out only requests of strictly lower priority. Requests that do not fit are passed by others, a bounded
number of times.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kv_control.queue import LOOK_PAST, QueuedRequest, WaitingQueue
from kv_control.residency import Residency
from kv_control.running import Int64Array
from kv_control.share import Share

_NO_ROWS: Int64Array = np.zeros(0, np.int64)


class Granted(NamedTuple):
    """Rows [n] of a step being formed, most senior first, and how many tokens [n] each computes."""

    rows: Int64Array
    tokens: Int64Array


class Admission:
    """Between `waiting` and the rows and pages of `residency`."""

    def __init__(self, residency: Residency, waiting: WaitingQueue, *, longest_prefix_first: bool) -> None:
        self._residency = residency
        self._running = residency.running
        self._waiting = waiting
        self._longest_prefix_first = longest_prefix_first

    def rows_in_the_way(self) -> Int64Array:
        """Rows of strictly lower priority to preempt for the head of the queue, most junior first; none where that
        would not let it in, or where it can come in without.
        """
        head = next(iter(self._waiting.first(1)), None)
        if head is None:
            return _NO_ROWS
        juniors = self._pushed_out_by(head)
        share = self._residency.find(head) if juniors.size else None
        if share is None:
            return _NO_ROWS
        share = share.without_fork()
        missing = self._pages_to_admit(head, share) + self._outstanding_pages() - self._residency.room_beside(share)
        no_row = self._residency.request_map.free_rows == 0
        if missing <= 0 and not no_row:
            return _NO_ROWS
        gains = self._residency.pages_gained(juniors, share.held_pages) + np.cumsum(
            self._residency.pages_outstanding(juniors)
        )
        if gains[-1] < missing:
            return _NO_ROWS
        return juniors[: max(int(np.searchsorted(gains, missing)) + 1, 1)]

    def admit(self, budget: int, *, made_way: bool) -> Granted:
        """Start waiting requests in what is left of the step's `budget` of tokens, of the rows and of the pages."""
        outstanding = self._outstanding_pages()
        rows: list[int] = []
        tokens: list[int] = []
        refused: list[int] = []
        for request, share in self._candidates(made_way=made_way):
            if budget <= 0 or not self._residency.request_map.free_rows:
                break
            if any(map(self._waiting.passed_too_often, refused)):
                break
            needed = self._pages_to_admit(request, share)
            fitted = self._residency.fitted(share, needed + outstanding)
            if fitted is None:
                refused.append(request.request_id)
                continue
            self._waiting.start(request)
            rows.append(self._residency.enter(request, fitted, held=False).row)
            tokens.append(min(len(request.token_ids) - int(self._running.kv_len[rows[-1]]), budget))
            budget -= tokens[-1]
            outstanding += needed
        return Granted(np.asarray(rows, np.int64), np.asarray(tokens, np.int64))

    def _pushed_out_by(self, head: QueuedRequest) -> Int64Array:
        """Rows that `head` may preempt, most junior first."""
        running = self._running
        lower = self._residency.request_map.live & ~running.held & (running.priority < head.priority)
        # A request that has aged past `head` is its senior, whatever its priority.
        lower &= running.senior_turn > head.seniority.turn
        return running.by_seniority(np.flatnonzero(lower))[::-1]

    def _outstanding_pages(self) -> int:
        return int(self._residency.pages_outstanding(np.flatnonzero(self._residency.request_map.live)).sum())

    def _pages_to_admit(self, request: QueuedRequest, share: Share) -> int:
        # One token beyond what is there, so that a preempted request gets further than it was before.
        tokens = min(len(request.token_ids) + 1, request.max_tokens_total - 1)
        return self._residency.pages_to_run(tokens, share)

    def _candidates(self, *, made_way: bool) -> Iterator[tuple[QueuedRequest, Share]]:
        """Waiting requests in the order of admission, with what they could share; none that had better wait."""
        waiting = self._waiting.first(self._residency.request_map.free_rows + LOOK_PAST)
        # Where others had to make way it was for the head of the queue, and nobody may take its place.
        if self._longest_prefix_first and not made_way:
            waiting.sort(key=self._prefix_order)
        for request in waiting:
            # Looked up one by one: each may wait for what the one before it has just begun to compute.
            share = self._residency.find(request)
            if share is not None:
                yield request, share

    def _prefix_order(self, request: QueuedRequest) -> tuple[bool, int, int]:
        """Longest cached prefix first among equal priorities, behind whoever has been passed too often."""
        share = self._residency.find(request)
        cached = 0 if share is None else share.cached_tokens(self._residency.layout.tokens_per_page)
        return not self._waiting.passed_too_often(request.request_id), -request.priority, -cached
