"""Which pages of prompts are being computed right now, and by whom, so that a second request can wait for them.

A running request claims the keys of its prompt's pages; the first to claim a key owns it. Claims are advice: they end
with the request, and a key without an owner is merely computed by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Iterable


class PendingPrefixes:
    """Keys claimed by owners (request ids)."""

    def __init__(self) -> None:
        self._owner_of: dict[bytes, int] = {}
        self._keys_of: dict[int, list[bytes]] = {}

    def claim(self, keys: Iterable[bytes], owner: int) -> None:
        """Make `owner` the one who computes those of `keys` that nobody has claimed."""
        claimed = [key for key in keys if self._owner_of.setdefault(key, owner) == owner]
        self._keys_of.setdefault(owner, []).extend(claimed)

    def owner_of(self, key: bytes) -> int | None:
        """Who computes the page with this key, or None."""
        return self._owner_of.get(key)

    def end(self, owner: int) -> None:
        """Drop the claims of `owner`, if any."""
        for key in self._keys_of.pop(owner, ()):
            # A key that was claimed twice by its owner is listed twice.
            self._owner_of.pop(key, None)

    def clear(self) -> None:
        """Drop every claim."""
        self._owner_of.clear()
        self._keys_of.clear()
