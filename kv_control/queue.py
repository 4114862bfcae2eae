"""Requests that wait for a row: new ones, and those that were preempted.

Order is by when a request would be through its prompt if it had the whole budget from its arrival on, the virtual
finish time of fair queueing (Demers, Keshav and Shenker, 1989), and as if it had arrived `priority * AGING_STEPS` steps
earlier. Of those that come together the shortest goes first, which is what makes the mean wait shortest. It is aging
without bookkeeping, too: a request is overtaken only by those that arrive within as many steps as its own prompt takes,
or of higher priority within a bounded number. A preempted request keeps its turn, so it returns to its old place.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

AGING_STEPS = 256
"""Steps of waiting that are worth one level of priority."""

LOOK_PAST = 16
"""Waiting requests that are considered for admission in a step, beyond as many as there are free rows."""

MAX_TIMES_PASSED = 64
"""Requests that may start ahead of one that came before them but does not fit; after that it goes next."""


class Seniority(NamedTuple):
    """Smaller is more senior: the virtual finish in tokens of steps' budgets, and the order of arrival among equals."""

    turn: int
    order: int


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request outside the pool: everything that is needed to start it, or to start it again.

    `token_ids` [tokens] int32 is the prompt and whatever was generated before a preemption; `prompt_len` says where
    the prompt ends. `max_tokens_total` bounds prompt and generated tokens together. `namespace` is the digest under
    which its pages are cached, and `read_cache` whether it may take pages from there. `parent` is the request whose
    prompt pages this one shares, where it was forked.
    """

    request_id: int
    token_ids: NDArray[np.int32]
    prompt_len: int
    max_tokens_total: int
    priority: int
    seniority: Seniority
    namespace: bytes
    read_cache: bool = True
    parent: int | None = None


class WaitingQueue:
    """Requests in order of seniority, with removal by id, and how often each was passed by others."""

    def __init__(self) -> None:
        self._order: list[tuple[Seniority, int]] = []
        self._waiting: dict[int, QueuedRequest] = {}
        self._times_passed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def push(self, request: QueuedRequest) -> None:
        """Add a request whose id is not waiting yet."""
        self._waiting[request.request_id] = request
        insort(self._order, (request.seniority, request.request_id))

    def first(self, count: int) -> list[QueuedRequest]:
        """The `count` requests that are next in order, or all where fewer wait."""
        return [self._waiting[request_id] for _, request_id in self._order[:count]]

    def start(self, request: QueuedRequest) -> None:
        """Take a request that starts now, and count that it passes those before it."""
        for _, passed in self._order[: self._place_of(request)]:
            self._times_passed[passed] = self._times_passed.get(passed, 0) + 1
        self.remove(request.request_id)

    def passed_too_often(self, request_id: int) -> bool:
        """Whether no more requests may start ahead of this one."""
        return self._times_passed.get(request_id, 0) >= MAX_TIMES_PASSED

    def remove(self, request_id: int) -> QueuedRequest | None:
        """Take a request out of turn; None where it does not wait."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            del self._order[self._place_of(request)]
            self._times_passed.pop(request_id, None)
        return request

    def _place_of(self, request: QueuedRequest) -> int:
        return bisect_left(self._order, (request.seniority, request.request_id))
