"""Ids ordered by when they were last pushed, every operation vectorised and amortised O(1) per id named.

A push appends an entry and makes the id's earlier entry stale; nothing is searched for or moved. Stale entries are
skipped when they reach the front, and dropped together when the buffer is full, which frees at least half of it. Order
is the order of the pushes: no clock is read, so equal runs evict alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ABSENT = -1
_SMALLEST_SCAN = 64  # entries; below this a numpy call costs more than what it looks at


class RecencyQueue:
    """Some of the ids 0 .. num_ids - 1, least recently pushed first. Callers pass distinct ids within range."""

    def __init__(self, num_ids: int) -> None:
        self._entries = np.zeros(2 * num_ids, np.int32)
        # Where the one entry of an id is that counts.
        self._place = np.full(num_ids, _ABSENT, np.int32)
        self._head = 0
        self._tail = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, ids: NDArray[np.int32]) -> None:
        """Make `ids` [n] the most recent, the last of them most of all, whether or not they are queued already."""
        if self._tail + ids.size > self._entries.size:
            self._drop_stale()
        self._size += int(np.count_nonzero(self._place[ids] == _ABSENT))
        end = self._tail + ids.size
        self._entries[self._tail : end] = ids
        self._place[ids] = np.arange(self._tail, end)
        self._tail = end

    def discard(self, ids: NDArray[np.int32]) -> None:
        """Take those of `ids` [n] out that are queued."""
        self._size -= int(np.count_nonzero(self._place[ids] != _ABSENT))
        self._place[ids] = _ABSENT

    def oldest(self, count: int) -> NDArray[np.int32]:
        """The least recently pushed ids, oldest first, still queued: int32 [min(count, len)].

        O(1) per id for a caller that discards or pushes again what it is shown.
        """
        wanted = min(count, self._size)
        parts: list[NDArray[np.int32]] = []
        found, at, length = 0, self._head, max(wanted, _SMALLEST_SCAN)
        while found < wanted:
            current = self._current(at, min(at + length, self._tail))
            at, length = at + length, 2 * length
            if found == 0:
                self._head = int(self._place[current[0]]) if current.size else at
            parts.append(current[: wanted - found])
            found += parts[-1].size
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _current(self, start: int, end: int) -> NDArray[np.int32]:
        entries = self._entries[start:end]
        return entries[self._place.take(entries) == np.arange(start, end)]

    def _drop_stale(self) -> None:
        kept = self._current(self._head, self._tail)
        self._entries[: kept.size] = kept
        self._place[kept] = np.arange(kept.size)
        self._head, self._tail = 0, kept.size
