"""Requests that wait for a row: new ones, and those that were preempted.

Order is priority (higher first), then arrival; a preempted request keeps the arrival number it was given at submit,
so it returns to its old place and not to the end. Removal by id is lazy: the heap entry stays and is skipped when it
surfaces.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request outside the pool: everything that is needed to start it, or to start it again.

    `token_ids` [tokens] int32 is the prompt and whatever was generated before a preemption; `prompt_len` says where
    the prompt ends. `max_tokens_total` bounds prompt and generated tokens together.
    """

    request_id: int
    token_ids: NDArray[np.int32]
    prompt_len: int
    max_tokens_total: int
    priority: int
    arrival: int


class WaitingQueue:
    """A priority queue of QueuedRequest with removal by id; every operation is O(log n) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._waiting: dict[int, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def push(self, request: QueuedRequest) -> None:
        """Add a request whose id is not waiting yet."""
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (-request.priority, request.arrival, request.request_id))

    def peek(self) -> QueuedRequest | None:
        """The request that is next in order, or None."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][2]] if self._heap else None

    def pop(self) -> QueuedRequest:
        """Take the request that `peek` shows. Raises IndexError where none waits."""
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty waiting queue")
        heapq.heappop(self._heap)
        return self._waiting.pop(request.request_id)

    def remove(self, request_id: int) -> QueuedRequest | None:
        """Take a request out of turn; None where it does not wait."""
        return self._waiting.pop(request_id, None)
