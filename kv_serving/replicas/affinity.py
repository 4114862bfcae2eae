"""Which replica has most of a prompt in its prefix cache, by what the caches themselves tell.

A chain is the keys of a prompt's full pages, in order; a summary is the keys of all pages that a replica has cached.
Both are of 8 bytes a key: a key that is taken for another costs a wrong choice of replica, never a wrong answer.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kv_execution import PagedEngine

KEY_BYTES = 8
_KEY = np.dtype("<u8")


def packed(keys: Iterable[bytes]) -> bytes:
    """The chain or summary of these keys."""
    return b"".join(key[:KEY_BYTES] for key in keys)


class CachedKeys:
    """A replica's side: the keys that its cache has now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}
        self._summary: bytes | None = b""

    def follow(self, engine: "PagedEngine") -> None:
        """Take over what has changed. Called on the engine's thread, between steps."""
        stored, removed, first = engine.prefix_changes()
        if not (stored or removed or first):
            return
        with self._lock:
            if first:
                self._keys.clear()
            for key in removed:
                self._keys.pop(key, None)
            self._keys.update(dict.fromkeys(stored))
            self._summary = None

    def summary(self) -> bytes:
        """The keys, 8 bytes each. Any thread may ask."""
        with self._lock:
            if self._summary is None:
                self._summary = packed(self._keys)
            return self._summary


class _Coming(NamedTuple):
    """Keys of prompts that were sent since the last summary, and between it and the one before."""

    new: set[int]
    old: set[int]


class _Known(NamedTuple):
    """What is known of a replica; `keys` are those of the summary, in order."""

    summary: bytes
    keys: NDArray[np.uint64]
    coming: _Coming


class AffinityIndex:
    """The router's side: the last summary of each replica, and the prompts on their way there."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def update(self, replica: str, summary: bytes) -> None:
        """A replica has these keys now."""
        known = self._known.get(replica)
        if known is None or known.summary != summary:
            coming = _Coming(set(), set()) if known is None else _Coming(set(), known.coming.new)
            self._known[replica] = _Known(summary, np.sort(np.frombuffer(summary, _KEY)), coming)

    def expect(self, replica: str, chain: bytes) -> None:
        """A prompt was sent to a replica: its pages will be there, if not in its next summary then in the one after."""
        if replica in self._known:
            self._known[replica].coming.new.update(np.frombuffer(chain, _KEY).tolist())

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        for gone in self._known.keys() - set(replicas):
            del self._known[gone]

    def cached_pages(self, replica: str, chain: bytes) -> int:
        """How many pages of a prompt a replica has, from the first on without a gap."""
        known, wanted = self._known.get(replica), np.frombuffer(chain, _KEY)
        if known is None or not wanted.size:
            return 0
        at = np.searchsorted(known.keys, wanted)
        found = np.append(known.keys, wanted[:1])[at] == wanted
        found &= at < known.keys.size
        if known.coming.new or known.coming.old:
            found |= [key in known.coming.new or key in known.coming.old for key in wanted.tolist()]
        return int(wanted.size if found.all() else found.argmin())

    def ranked(self, chain: bytes, loads: Mapping[str, int], most_behind: int) -> list[list[str]]:
        """The replicas of `loads` (name to requests), in groups from best to worst; within one the load decides.

        The best has the longest part of the prompt among those that are at most `most_behind` requests busier than the
        least busy one; where none has any of it, all are one group.
        """
        least = min(loads.values(), default=0)
        pages = {
            replica: self.cached_pages(replica, chain) if load - least <= most_behind else 0
            for replica, load in loads.items()
        }
        longest = max(pages.values(), default=0)
        best = [replica for replica in loads if pages[replica] == longest]
        rest = [replica for replica in loads if pages[replica] != longest]
        return [group for group in (best, rest) if group]
