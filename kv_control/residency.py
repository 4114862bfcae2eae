"""Requests that hold a row: entering with the pages they can share, growing, publishing what fills, leaving.

The one owner of pages, rows and prefix trie. A request enters with the pages of the longest cached prefix of its
tokens, or of the request that it was forked from; a page that it shares only in part is copied by the step that first
writes behind it. Full pages are published as soon as the step that fills them is planned: later steps run after it on
the device, so whoever finds them there reads them after they were written.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1
from kv_control.page_allocator import PageAllocator
from kv_control.prefix_trie import PrefixTrie, page_digest
from kv_control.prefix_values import NOWHERE, Fork, Place, PrefixMatch
from kv_control.queue import QueuedRequest
from kv_control.request_map import RequestHandle, RequestMap
from kv_control.running import Int32Array, Int64Array, RunningRequests
from kv_control.share import Share
from kv_control.step_builder import StepBuilder

_NO_PAGES: Int32Array = np.zeros(0, np.int32)


class PageStep(NamedTuple):
    """The pages of one step: its table, pages to clear, and pages to copy (source to target) before anything is
    written.
    """

    table: KvPageTableV1
    scrub_pages: Int32Array
    copy_sources: Int32Array
    copy_targets: Int32Array


class Residency:
    """Rows and pages of running requests. With `prefix_cache=False` nothing is looked up or published; forks still
    share.

    `reach` is how many tokens a query sees, itself included, or None for all: pages wholly behind what any later query
    of a request sees are given back while it runs. `max_step_tokens` bounds what one step adds to a request.
    """

    def __init__(
        self,
        layout: KvStorageLayoutV1,
        *,
        max_requests: int,
        max_context: int,
        max_step_tokens: int,
        reach: int | None = None,
        prefix_cache: bool = True,
        digest: Callable[[bytes], bytes] = page_digest,
    ) -> None:
        self.layout = layout
        self.reach = reach
        # What a window and a step touch, and one page that is full before the host knows its tokens.
        self._most_held = (
            layout.pages_for(max_context)
            if reach is None
            else layout.pages_for(reach) + layout.pages_for(max_step_tokens) + 2
        )
        self.prefix_cache = prefix_cache
        self.allocator = PageAllocator(layout.num_pages)
        self.request_map = RequestMap(max_requests, layout.pages_for(max_context))
        self.running = RunningRequests(max_requests, max_context)
        self.trie = PrefixTrie(self.allocator, layout.tokens_per_page, digest=digest)
        self._builder = StepBuilder(layout, self.allocator, self.request_map)
        self._handles: dict[int, RequestHandle] = {}
        self._published_pages = np.zeros(max_requests, np.int64)
        self._place: list[Place] = [NOWHERE] * max_requests
        self._keys: list[list[bytes]] = [[] for _ in range(max_requests)]
        self._waiting_keys: dict[int, list[bytes]] = {}
        self._forks: dict[int, Fork] = {}

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._handles)

    @property
    def obtainable_pages(self) -> int:
        """Pages that can be dealt now: free ones, and those that only the cache holds."""
        return self.allocator.free_pages + self.allocator.cached_pages

    def handle_of(self, request_id: int) -> RequestHandle | None:
        """The handle of a request that holds a row."""
        return self._handles.get(request_id)

    def find(self, request: QueuedRequest, *, may_wait: bool = True) -> Share | None:
        """What `request` could share if it entered now; None where it `may_wait`, and another computes its next
        page.
        """
        match = self._match(request)
        parent = self._handles.get(request.parent) if request.parent is not None else None
        if parent is not None and not self.request_map.first_held[parent.row]:
            return self._share_of_parent(request, parent.row, match)
        if match is None:
            return Share(_NO_PAGES, None, NOWHERE, None, 0)
        missing = match.missing_key if may_wait and request.read_cache else None
        if missing is not None and self.trie.pending_owner(missing) is not None:
            return None
        return Share(match.pages, match.fork, match.place, match, self._pages_behind(match.cached_tokens))

    def room_beside(self, share: Share) -> int:
        """Pages that could be dealt once `share` is held."""
        only_cached = self.allocator.reference_count[share.held_pages] == self.allocator.cached[share.held_pages]
        return self.obtainable_pages - int(np.count_nonzero(only_cached))

    def fitted(self, share: Share, pages: int) -> Share | None:
        """`share` where `pages` more could be dealt beside it, less its fork where that would be in the way, or None.

        What a fork copies stays while it is copied, for which a pool of just the right size has no page.
        """
        if pages <= self.room_beside(share):
            return share
        smaller = share.without_fork()
        return smaller if pages <= self.room_beside(smaller) else None

    def enter(self, request: QueuedRequest, share: Share, *, held: bool) -> RequestHandle:
        """Give `request` a row that starts with `share`. Raises NoFreeRowError."""
        handle = self.request_map.open(request.request_id)
        row = handle.row
        if share.match is not None:
            self.trie.hold(share.match, behind=share.behind)
        else:
            self.allocator.share(share.held_pages)
        self.request_map.append_pages(np.array([row]), np.array([share.pages.size]), share.pages)
        self.request_map.give_back(row, share.behind)
        if share.fork is not None:
            self._forks[row] = share.fork
        cached_tokens = share.cached_tokens(self.layout.tokens_per_page)
        self.running.start(row, request, kv_len=cached_tokens, held=held)
        self._handles[request.request_id] = handle
        self._published_pages[row] = share.pages.size
        self._place[row] = share.place
        self._keys[row] = self._waiting_keys.pop(request.request_id, [])
        if not held and share.place != NOWHERE:
            # A held request moves only when its caller says so, and nobody should wait for that; nor for one that
            # will not publish.
            self.trie.pending.claim(self._keys[row][share.pages.size :], request.request_id)
        return handle

    def forget(self, request_id: int) -> None:
        """Drop what was remembered of a request that was looked up and will not enter."""
        self._waiting_keys.pop(request_id, None)

    def leave(self, request_id: int) -> bool:
        """Take a request's row and pages away; False where it holds none."""
        self._waiting_keys.pop(request_id, None)
        handle = self._handles.pop(request_id, None)
        if handle is None:
            return False
        self.trie.pending.end(request_id)
        fork = self._forks.pop(handle.row, None)
        if fork is not None:
            self.allocator.release([fork.source_page])
        self._builder.release_request(handle)
        return True

    def pages_needed(self, rows: Int64Array, new_tokens: Int64Array) -> Int64Array:
        """New pages [n] that `rows` [n] take when they compute `new_tokens` [n] more."""
        pages = -(-(self.running.kv_len[rows] + new_tokens) // self.layout.tokens_per_page)
        return pages - self.request_map.page_count[rows]

    def pages_outstanding(self, rows: Int64Array) -> Int64Array:
        """Pages [n] that `rows` [n] may yet take beyond those that they hold, for the tokens that they have."""
        missing = self.pages_needed(rows, self.running.kv_goal(rows) - self.running.kv_len[rows])
        held = self.request_map.page_count[rows] - self.request_map.first_held[rows]
        return np.clip(missing, 0, np.maximum(self._most_held - held, 0))

    def pages_to_run(self, tokens: int, share: Share | None = None) -> int:
        """Pages that a request of `tokens` takes at once at most, beyond those of `share`."""
        pages, held = self.layout.pages_for(tokens), 0
        if share is not None:
            pages, held = pages - share.pages.size, share.pages.size - share.behind
        return min(pages, max(self._most_held - held, 1))

    def pages_gained(self, rows: Int64Array, beside: Int32Array = _NO_PAGES) -> Int64Array:
        """How many more pages could be dealt once the first of `rows` [n] left, the first two, ...: [n].

        Those that are still held `beside` them do not count.
        """
        counts = self.request_map.page_count[rows]
        # From the last row back, so that a page is first met at the row with which its last holder leaves.
        pages = self.request_map.gather_pages(rows, counts)[::-1]
        named, first, holders = np.unique(pages, return_index=True, return_counts=True)
        others = self.allocator.reference_count[named] - self.allocator.cached[named] - holders
        gained = (others == 0) & ~np.isin(named, beside)
        leaver = np.repeat(np.arange(rows.size), counts)[::-1][first]
        return np.cumsum(np.bincount(leaver[gained], minlength=rows.size))

    def advance(self, rows: Int64Array, new_tokens: Int64Array) -> PageStep:
        """Plan the step in which `rows` [n] compute `new_tokens` [n] more. Raises OutOfPagesError, with nothing
        changed.
        """
        kv_len = self.running.kv_len[rows]
        short = int(self.pages_needed(rows, new_tokens).sum()) - self.allocator.free_pages
        if 0 < short <= self.allocator.cached_pages:
            self.trie.evict(short)
        reservation = self._builder.reserve(rows, kv_len, new_tokens)
        # The step clears these pages before it writes to any of them, so they count as clean from here on.
        self._builder.confirm(reservation)
        sources, targets = [], []
        if self._forks:
            first_new = np.cumsum(reservation.page_counts) - reservation.page_counts
            for index in np.flatnonzero(np.isin(rows, list(self._forks))).tolist():
                source = self._forks.pop(int(rows[index])).source_page
                sources.append(source)
                targets.append(int(reservation.pages[first_new[index]]))
                self.allocator.release([source])
        table = self._builder.build(rows, kv_len, new_tokens)
        self.running.kv_len[rows] = kv_len + new_tokens
        return PageStep(table, reservation.dirty, np.asarray(sources, np.int32), np.asarray(targets, np.int32))

    def give_back(self, rows: Int64Array) -> None:
        """Let go of the pages of `rows` [n] that no query after those of planned steps sees.

        Not of one that is to be published yet: it may be full before the host knows its tokens.
        """
        if self.reach is None:
            return
        unseen = np.maximum(self.running.kv_len[rows] - self.reach + 1, 0) // self.layout.tokens_per_page
        more = unseen > self.request_map.first_held[rows]
        for row, behind in zip(rows[more].tolist(), unseen[more].tolist(), strict=True):
            if self.prefix_cache and self._place[row] != NOWHERE:
                behind = min(behind, int(self._published_pages[row]))
            if behind > self.request_map.first_held[row]:
                self.allocator.release(self.request_map.give_back(row, behind))

    def publish(self, rows: Int64Array) -> None:
        """Cache the pages of `rows` [n] that are full of known tokens and not published yet."""
        if not self.prefix_cache:
            return
        known = np.minimum(self.running.kv_len[rows], self.running.num_known[rows])
        full = known // self.layout.tokens_per_page
        ready = full > self._published_pages[rows]
        for row, end in zip(rows[ready].tolist(), full[ready].tolist(), strict=True):
            self._publish_row(row, end)

    def check_invariants(self) -> None:
        """Raises InvariantError, DirtyPageError or PrefixNodesError where the books contradict each other. O(pool)."""
        holders = self.request_map.holders(self.layout.num_pages)
        for fork in self._forks.values():
            holders[fork.source_page] += 1
        self.allocator.check_invariants(holders)
        self.allocator.require_clean(np.flatnonzero(holders))
        self.trie.check_invariants()

    def _pages_behind(self, position: int) -> int:
        """Whole pages that a query at `position`, and those after it, see nothing of."""
        return 0 if self.reach is None else max(position - self.reach + 1, 0) // self.layout.tokens_per_page

    def _match(self, request: QueuedRequest) -> PrefixMatch | None:
        if not self.prefix_cache:
            return None
        keys = self._waiting_keys.get(request.request_id)
        match = self.trie.match(request.namespace, request.token_ids, keys=keys, read_cache=request.read_cache)
        self._waiting_keys[request.request_id] = match.keys
        return match

    def _share_of_parent(self, request: QueuedRequest, row: int, match: PrefixMatch | None) -> Share | None:
        # A parent that has only just entered again has not got its own copy of a page yet.
        if self.running.kv_len[row] < request.prompt_len or row in self._forks:
            return None
        # The prompt's last token is computed again: its logits are what the fork samples from.
        whole, rest = divmod(request.prompt_len - 1, self.layout.tokens_per_page)
        pages = self.request_map.pages_of(row)
        fork = Fork(int(pages[whole]), rest) if rest else None
        pages = pages[:whole].copy()
        behind = self._pages_behind(request.prompt_len - 1)
        if match is not None and np.array_equal(match.pages, pages):
            return Share(pages, fork, match.place, match._replace(fork=fork), behind)
        return Share(pages, fork, NOWHERE, None, behind)

    def _publish_row(self, row: int, end: int) -> None:
        start = int(self._published_pages[row])
        self._published_pages[row] = end
        place = self._place[row]
        if place == NOWHERE:
            return
        tokens_per_page = self.layout.tokens_per_page
        published = self.trie.publish(
            place,
            self.running.known_tokens(row, start * tokens_per_page, end * tokens_per_page),
            self.request_map.pages_of(row)[start:end],
            keys=self._keys[row][start:end] if end <= len(self._keys[row]) else None,
        )
        self._place[row] = published.place
        if published.place == NOWHERE:
            # What it has claimed it will not publish, so nobody should wait for it.
            self.trie.pending.end(int(self.running.request_id[row]))
        if published.duplicates:
            self.request_map.replace_pages(row, start, published.pages)
