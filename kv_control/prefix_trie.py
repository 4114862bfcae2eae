"""Which prefixes are cached, in which pages: matching prompts, publishing pages as they fill, evicting the oldest.

Keys are hashes chained from the namespace digest, and what they find is compared (`prefix_nodes`): a hash that collides
costs hits, never a wrong one. The trie holds one reference to each of its pages. A request holds whole paths, so pages
below a page that only the cache holds are cached only as well, and let go of before it: the oldest cached page is a
leaf, and eviction walks nothing, unless a request has given back pages behind its window. `hold` makes a match count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import JaxkvError
from kv_control.key_changes import KeyChanges
from kv_control.key_memory import KeyMemory
from kv_control.page_allocator import PageAllocator
from kv_control.pending_prefixes import PendingPrefixes
from kv_control.prefix_nodes import NO_NODE, PrefixNodes
from kv_control.prefix_values import (
    NOWHERE,
    Fork,
    MissReason,
    Place,
    PrefixMatch,
    PrefixStatistics,
    Published,
    root_place,
)

EVICTED_KEYS_REMEMBERED = 1 << 16
FORK_CANDIDATES = 32
_INT32 = np.iinfo(np.int32)


class PrefixTrieError(JaxkvError):
    """Tokens, keys or pages that cannot be looked up or published as given."""


class StaleMatchError(JaxkvError):
    """A match some of whose pages may have left the trie since."""


def page_digest(data: bytes) -> bytes:
    """16 bytes that name `data`."""
    return blake2b(data, digest_size=16).digest()


class PrefixTrie:
    """The cached prefixes of one pool.

    `digest` names bytes; `pending` says which request computes a page that is not cached yet.
    """

    def __init__(
        self, allocator: PageAllocator, tokens_per_page: int, *, digest: Callable[[bytes], bytes] = page_digest
    ) -> None:
        self.allocator = allocator
        self.tokens_per_page = tokens_per_page
        self.pending = PendingPrefixes()
        self._digest = digest
        self._nodes = PrefixNodes(allocator.num_pages, tokens_per_page)
        self._evicted = KeyMemory(EVICTED_KEYS_REMEMBERED)
        self._generation = 0
        self._asked_tokens = self._hit_tokens = self._published = self._duplicates = self._evictions = 0
        self._misses = dict.fromkeys(MissReason, 0)

    @property
    def evictable_pages(self) -> int:
        """How many pages `evict` could free now. O(1)."""
        return self.allocator.cached_pages

    def evictable_pages_beside(self, match: PrefixMatch) -> int:
        """How many pages `evict` could free once `match` is held."""
        only_cached = self.allocator.reference_count[match.pages_to_hold] == 1
        return self.allocator.cached_pages - int(np.count_nonzero(only_cached))

    @property
    def statistics(self) -> PrefixStatistics:
        """The counters as they stand."""
        return PrefixStatistics(
            lookups=sum(self._misses.values()),
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            misses=dict(self._misses),
            published=self._published,
            duplicates=self._duplicates,
            evictions=self._evictions,
            cached_pages=len(self._nodes),
        )

    def page_keys(self, start: bytes, token_ids: ArrayLike) -> list[bytes]:
        """The key of every full page of `token_ids` [tokens]; `start` is the namespace digest, or the key before.

        Raises PrefixTrieError for token ids that are not int32.
        """
        tokens = _as_tokens(token_ids)
        width = self.tokens_per_page * tokens.itemsize
        content = tokens.tobytes()
        keys, key = [], start
        for at in range(0, len(content) - width + 1, width):
            key = self._digest(key + content[at : at + width])
            keys.append(key)
        return keys

    def match(
        self, namespace: bytes, token_ids: ArrayLike, *, keys: list[bytes] | None = None, read_cache: bool = True
    ) -> PrefixMatch:
        """The longest cached prefix of `token_ids` [tokens] under the namespace with this digest; changes nothing.

        `keys` are those of an earlier match of the same tokens, so that a request that waits is hashed once. With
        `read_cache=False` nothing is found, and the request can publish all the same. Raises PrefixTrieError.
        """
        tokens = _as_tokens(token_ids)
        if tokens.size == 0:
            raise PrefixTrieError("no tokens to match: a prompt has at least one")
        keys = self.page_keys(namespace, tokens) if keys is None else keys
        content = self._as_pages(tokens[: tokens.size // self.tokens_per_page * self.tokens_per_page], keys)
        path = content[:0, 0]
        fork, reason = None, MissReason.UNCACHEABLE
        # One token is always left to compute, so a prompt that ends with its last page does not take it whole.
        most = (tokens.size - 1) // self.tokens_per_page
        if read_cache:
            root = self._nodes.root_of(namespace)
            path = self._nodes.walk(root, keys, content)
            reason = self._reason(path.size, most, keys, content)
            fork = self._fork(root, path, most, tokens)
        pages = path[:most]
        place = Place(int(pages[-1]), keys[pages.size - 1], pages.size) if pages.size else root_place(namespace)
        page_tokens = pages.size * self.tokens_per_page
        return PrefixMatch(pages, place, fork, page_tokens, tokens.size, reason, keys, self._generation)

    def hold(self, match: PrefixMatch, *, behind: int = 0) -> None:
        """Hold the pages of `match` from `behind` on and the source of its fork for one request; count the lookup.

        The caller releases them through the allocator: the source when the step that copies it has been planned, the
        pages with the request. Raises StaleMatchError after an eviction or a reset.
        """
        if match.generation != self._generation:
            raise StaleMatchError(
                f"pages have left the trie {self._generation - match.generation} times since the match of "
                f"{match.pages.size} pages: match again"
            )
        self.allocator.share(match.pages_to_hold[behind:])
        self._misses[match.miss_reason] += 1
        self._asked_tokens += match.asked_tokens
        self._hit_tokens += match.cached_tokens

    def publish(
        self, place: Place, token_ids: ArrayLike, pages: ArrayLike, *, keys: Sequence[bytes] | None = None
    ) -> Published:
        """Cache `pages` [n] below `place`; the caller holds them and has filled them with `token_ids` [n * page].

        Where the same path is cached already, the caller holds its pages from now on and its own are released. Where
        the place has left the trie, or a key is taken by other content, the rest stays the caller's alone and the next
        place is NOWHERE. `keys` [n] as of `match`. Raises PrefixTrieError, PageIdError, PageNotAllocatedError,
        PageCacheError and DirtyPageError, with nothing changed.
        """
        own = np.array(pages, np.int32).reshape(-1)
        if own.size == 0 or not self._is_current(place):
            return Published(place if own.size == 0 else NOWHERE, own, 0)
        tokens = _as_tokens(token_ids)
        keys = self.page_keys(place.key, tokens) if keys is None else keys
        content = self._as_pages(tokens, keys)
        if len(content) != own.size or (own.size > 1 and np.unique(own).size < own.size):
            raise PrefixTrieError(
                f"{own.size} pages for {tokens.size} tokens: pass distinct pages, one per {self.tokens_per_page} tokens"
            )
        parent = place.page or self._nodes.root_of(place.key)
        path = self._nodes.walk(parent, keys, content)
        if path.size:
            self.allocator.require_held(own[: path.size])
        end = path.size + self._nodes.count_free(keys[path.size :])
        if end > path.size:
            new = slice(path.size, end)
            self.allocator.retain_cached(own[new])
            below = int(path[-1]) if path.size else parent
            self._nodes.attach(below, own[new], keys[new], content[new], namespace=place.key)
            self._published += end - path.size
        duplicates = self._swap(own, path) if path.size else 0
        done = Place(int(own[-1]), keys[-1], place.pages + end) if end == own.size else NOWHERE
        return Published(done, own, duplicates)

    def pending_owner(self, key: bytes) -> int | None:
        """Who computes the page with this key and will publish it; None where nobody does, or it is cached."""
        return None if key in self._nodes else self.pending.owner_of(key)

    def evict(self, pages_wanted: int) -> NDArray[np.int32]:
        """Free up to `pages_wanted` pages that only the cache holds, oldest leaves first: int32 [freed].

        Pages below one of them that requests hold stay theirs, no longer cached.
        """
        freed = [np.zeros(0, np.int32)]
        passed_over = 0
        while pages_wanted > 0 and self.allocator.cached_pages:
            if passed_over >= self.allocator.cached_pages:
                self._cut_off_held(int(self.allocator.oldest_cached(1)[0]))
                passed_over = 0
            oldest = self.allocator.oldest_cached(pages_wanted)
            gone = self._nodes.detach(oldest)
            if gone.size < oldest.size:
                # A request let go of a page before the pages below it: these come first after all.
                self.allocator.renew_cached(oldest[~np.isin(oldest, gone)])
            passed_over = 0 if gone.size else passed_over + oldest.size
            self._evicted.add(self._nodes.key_of(page) for page in gone.tolist())
            self.allocator.release_cached(gone)
            pages_wanted -= gone.size
            freed.append(gone)
        pages = np.concatenate(freed)
        self._evictions += pages.size
        self._generation += bool(pages.size)
        return pages

    def take_changes(self) -> KeyChanges:
        """Which keys came and left since the last call; the first tells of all that are cached."""
        return self._nodes.take_changes()

    def reset(self) -> NDArray[np.int32]:
        """Forget every prefix; return the pages that became free. Pages of requests stay theirs, no longer cached."""
        self._nodes.clear()
        self._evicted.clear()
        self.pending.clear()
        self._generation += 1
        return self.allocator.release_cached(np.flatnonzero(self.allocator.cached))

    def check_invariants(self) -> None:
        """Raise PrefixNodesError where nodes, links and cached pages disagree. O(cached pages)."""
        self._nodes.check_invariants(self.allocator.cached)

    def _as_pages(self, tokens: NDArray[np.int32], keys: Sequence[bytes]) -> NDArray[np.int32]:
        pages, rest = divmod(tokens.size, self.tokens_per_page)
        if rest or len(keys) != pages:
            raise PrefixTrieError(
                f"{len(keys)} keys for {tokens.size} tokens: pass one per page of {self.tokens_per_page} tokens"
            )
        return tokens.reshape(pages, self.tokens_per_page)

    def _is_current(self, place: Place) -> bool:
        if place.page <= NO_NODE:
            return place.page == NO_NODE
        return bool(self.allocator.cached[place.page]) and self._nodes.key_of(place.page) == place.key

    def _reason(self, found: int, most: int, keys: Sequence[bytes], content: NDArray[np.int32]) -> MissReason:
        if found == len(keys):
            return MissReason.LAST_TOKEN if found > most else MissReason.NONE
        if keys[found] in self._evicted:
            return MissReason.EVICTED
        if found == 0 and self._nodes.starts_some_path(content[0]):
            return MissReason.NAMESPACE
        return MissReason.NO_SUCH_PREFIX

    def _fork(self, root: int, path: NDArray[np.int32], most: int, tokens: NDArray[np.int32]) -> Fork | None:
        """The cached page that starts like what follows the whole pages, one token of the prompt left over."""
        pages = path[:most]
        rest = tokens[pages.size * self.tokens_per_page :]
        longest = min(rest.size, self.tokens_per_page) - 1
        if longest < 1:
            return None
        if path.size > pages.size:
            return Fork(int(path[-1]), longest)
        children = self._nodes.newest_children(int(pages[-1]) if pages.size else root, FORK_CANDIDATES)
        equal = self._nodes.tokens_of(children)[:, :longest] == rest[:longest]
        lengths = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        best = int(lengths.argmax()) if children.size else 0
        return Fork(int(children[best]), int(lengths[best])) if children.size and lengths[best] else None

    def _cut_off_held(self, page: int) -> None:
        """Forget what requests hold below the deepest page that only the cache holds, at or below `page`."""
        below = self._nodes.subtree(page)
        idle = below[self.allocator.reference_count[below] == 1]
        held = self._nodes.subtree(int(idle[-1]))[1:]
        self._nodes.detach(held)
        self.allocator.release_cached(held)
        self.allocator.renew_cached(idle[::-1])  # from the leaf up, as they are to go

    def _swap(self, own: NDArray[np.int32], path: NDArray[np.int32]) -> int:
        """Put the cached pages of `path` in the place of the caller's first ones, which are released."""
        differ = np.flatnonzero(own[: path.size] != path)
        if differ.size:
            self.allocator.share(path[differ])
            self.allocator.release(own[differ])
            own[differ] = path[differ]
            self._duplicates += differ.size
        return differ.size


def _as_tokens(token_ids: ArrayLike) -> NDArray[np.int32]:
    """`token_ids` as int32 little-endian [tokens], never truncated: two ids that alias would be a wrong hit."""
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1:
        raise PrefixTrieError(f"token ids have shape {tokens.shape}: pass [tokens]")
    if tokens.size and tokens.dtype != np.int32:
        if tokens.dtype.kind not in "iu":
            raise PrefixTrieError(f"token ids have dtype {tokens.dtype}: pass integers")
        if tokens.min() < _INT32.min or tokens.max() > _INT32.max:
            raise PrefixTrieError(f"token ids span {tokens.min()} .. {tokens.max()}: they must fit int32")
    return tokens.astype("<i4", copy=False)
