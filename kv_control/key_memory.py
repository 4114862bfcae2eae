"""The keys that were added last, up to a fixed number: enough to say why a lookup failed, and no more memory than that.

First in, first out; a key that is added again while it is remembered keeps its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class KeyMemory:
    """A set of at most `capacity` keys."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: deque[bytes] = deque()
        self._keys: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember `keys`, and forget the oldest beyond the capacity."""
        for key in keys:
            if key not in self._keys:
                self._keys.add(key)
                self._order.append(key)
        while len(self._order) > self._capacity:
            self._keys.discard(self._order.popleft())

    def clear(self) -> None:
        """Forget every key."""
        self._order.clear()
        self._keys.clear()
