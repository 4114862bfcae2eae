"""Which keys came to the prefix cache and which left it, for whoever keeps a copy of the list elsewhere.

Contract: net changes, so that a key which came and left between two looks is not told, and what is kept is at most one
entry for each page that is or was in the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class KeyChanges(NamedTuple):
    """`stored` came and `removed` left since the last look; where it is the `first`, nothing was known before."""

    stored: list[bytes]
    removed: list[bytes]
    first: bool


class KeyChangeRecord:
    """Collects changes from the first `take` on."""

    def __init__(self) -> None:
        self._taken = False
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def store(self, keys: Iterable[bytes]) -> None:
        """These came."""
        if self._taken:
            for key in keys:
                if key in self._removed:
                    del self._removed[key]
                else:
                    self._stored[key] = None

    def remove(self, keys: Iterable[bytes]) -> None:
        """These left."""
        if self._taken:
            for key in keys:
                if key in self._stored:
                    del self._stored[key]
                else:
                    self._removed[key] = None

    def take(self, present: Iterable[bytes]) -> KeyChanges:
        """What changed since the last call; at the first, all that are `present`."""
        if not self._taken:
            self._taken = True
            return KeyChanges(list(present), [], first=True)
        changes = KeyChanges(list(self._stored), list(self._removed), first=False)
        self._stored, self._removed = {}, {}
        return changes
