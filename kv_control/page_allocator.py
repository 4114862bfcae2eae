"""Who owns each page of the pool: a free stack, reference counts, epochs and dirty bits.

A page is free, live (some request holds it) or cached (only the prefix cache does, whose hold is a reference like any
other but has calls of its own, so that no request can drop it). One call speaks for one holder: a page named twice in
a call counts once. Arguments are checked before anything changes: an error leaves the allocator as it was. A page is
dirty from when its last reference goes, through the next allocation, until `confirm_scrubbed`: only its new owner can
say that the old K/V is gone. Costs follow the pages named in a call, not the pool. Page 0 is padding, never dealt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE
from kv_control.recency_queue import RecencyQueue

_NAMED_PAGES = 4  # how many offending pages an error message lists


class PageIdError(JaxkvError):
    """A page id that no pool of this size can deal: negative, too large, the padding page, or not an integer."""


class PageNotAllocatedError(JaxkvError):
    """A free page that was never allocated, or that cannot be shared or confirmed because nobody holds it."""


class DoubleFreeError(JaxkvError):
    """A page released after its last reference had already gone."""


class DirtyPageError(JaxkvError):
    """A page about to be read or cached that may still hold its previous owner's K/V."""


class PageCacheError(JaxkvError):
    """A page cached twice, or let go by the cache without being cached."""


class InvariantError(JaxkvError):
    """The bookkeeping contradicts itself: a bug of this program, not of its input."""


class OutOfPagesError(JaxkvError):
    """Fewer pages are free than were asked for; `requested` and `free` carry the two numbers."""

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} pages requested, {free} free: preempt or finish a request, or enlarge the pool")
        self.requested = requested
        self.free = free


class PageAllocator:
    """The only dealer of the pages 1 .. num_pages - 1 of a pool.

    Read-only arrays [num_pages]: `reference_count` int32, the prefix cache's references included; `epoch` int64, how
    often the page has been freed; `dirty` bool; `cached` bool, whether the prefix cache holds it, alone or not.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise PageIdError(f"num_pages is {num_pages}: at least 2 are needed, page {PADDING_PAGE} being padding")
        self.num_pages = num_pages
        # The top of the stack is its end, so a fresh pool deals 1, 2, 3, ...
        self._free_stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._free = num_pages - 1
        self._references = np.zeros(num_pages, np.int32)
        self._epoch = np.zeros(num_pages, np.int64)
        self._dirty = np.zeros(num_pages, np.bool_)
        self._cached = np.zeros(num_pages, np.bool_)
        # Pages in the state cached, in the order in which requests let go of them.
        self._idle = RecencyQueue(num_pages)
        self.reference_count = _read_only(self._references)
        self.epoch = _read_only(self._epoch)
        self.dirty = _read_only(self._dirty)
        self.cached = _read_only(self._cached)

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self._free

    @property
    def live_pages(self) -> int:
        """Pages that at least one request holds."""
        return self.num_pages - 1 - self._free - len(self._idle)

    @property
    def cached_pages(self) -> int:
        """Pages that nobody but the prefix cache holds. free + live + cached is the usable pool."""
        return len(self._idle)

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Deal `count` pages with one reference each, most recently freed first: int32 [count].

        All or nothing. They may be dirty. Raises OutOfPagesError, or PageIdError for a negative count.
        """
        if count < 0:
            raise PageIdError(f"{count} pages requested: ask for zero or more")
        if count > self._free:
            raise OutOfPagesError(count, self._free)
        left = self._free - count
        pages = self._free_stack[left : self._free][::-1].copy()
        self._free = left
        self._references[pages] = 1
        return pages

    def share(self, pages: ArrayLike) -> None:
        """Add one holder to `pages` [any]: one reference each. Raises PageIdError, PageNotAllocatedError."""
        named = _distinct(self._checked(pages))
        self._require_allocated(named, "share")
        if len(self._idle):
            self._idle.discard(named)
        self._references[named] += 1

    def release(self, pages: ArrayLike) -> NDArray[np.int32]:
        """Drop one holder of `pages` [any]; return those that became free, ascending: int32 [<= pages].

        The freed pages are dirty and their epochs have moved on. Pass a request's pages in the order of its tokens:
        those that only the cache holds from now on grow old from the last to the first. Raises PageIdError,
        DoubleFreeError and PageNotAllocatedError.
        """
        ids = self._checked(pages)
        named = _distinct(ids)
        cached = self._cached[named]
        holders = self._references[named] - cached
        if not holders.all():
            self._refuse_release(named[holders == 0])
        self._references[named] -= 1
        last = holders == 1
        idle = named[last & cached]
        if idle.size:
            # Repeats leave no order of tokens to go by.
            in_order = ids[::-1] if ids.size == named.size else named
            self._idle.push(in_order[(self._references[in_order] == 1) & self._cached[in_order]])
        return self._free_up(named[last & ~cached])

    def require_held(self, pages: ArrayLike) -> None:
        """Raise PageNotAllocatedError unless requests hold all of `pages` [any]; PageIdError for a bad id."""
        named = self._checked(pages)
        unheld = self._references[named] <= self._cached[named]
        if unheld.any():
            raise PageNotAllocatedError(
                f"{_listed(named[unheld])} held by no request: pass pages that the caller holds"
            )

    def retain_cached(self, pages: ArrayLike) -> None:
        """Add the prefix cache's reference to `pages` [any], which requests hold and have filled.

        Raises PageIdError, PageNotAllocatedError, PageCacheError for a page that is cached already, and DirtyPageError.
        """
        named = _distinct(self._checked(pages))
        references = self._references[named]
        # One test where all is well: this runs for every page that any request fills.
        if (self._cached[named] | self._dirty[named] | (references == 0)).any():
            self._refuse_retain(named)
        self._references[named] = references + 1
        self._cached[named] = True

    def release_cached(self, pages: ArrayLike) -> NDArray[np.int32]:
        """Drop the prefix cache's reference to `pages` [any]; return those that became free: int32 [<= pages].

        Pages that requests hold stay theirs. Raises PageIdError, and PageCacheError for a page that is not cached.
        """
        named = _distinct(self._checked(pages))
        if not self._cached[named].all():
            raise PageCacheError(f"{_listed(named[~self._cached[named]])} not cached: the cache lets go of a page once")
        self._idle.discard(named)
        self._references[named] -= 1
        self._cached[named] = False
        return self._free_up(named[self._references[named] == 0])

    def oldest_cached(self, count: int) -> NDArray[np.int32]:
        """The cached pages that requests let go of first, oldest first: int32 [min(count, cached_pages)]."""
        return self._idle.oldest(count)

    def renew_cached(self, pages: ArrayLike) -> None:
        """Count `pages` [any, distinct] as let go of just now, the last of them latest.

        Raises PageIdError, and PageCacheError unless they are held by the cache alone.
        """
        named = self._checked(pages).astype(np.int32, copy=False)
        idle = self._cached[named] & (self._references[named] == 1)
        if not idle.all():
            raise PageCacheError(f"{_listed(named[~idle])} held by requests or by nobody: renew cached pages only")
        self._idle.push(named)

    def confirm_scrubbed(self, pages: ArrayLike) -> None:
        """Record that `pages` [any] were overwritten since they were allocated: they are clean.

        A free page cannot be confirmed, since it may yet be written. Raises PageIdError, PageNotAllocatedError.
        """
        named = self._checked(pages)
        self._require_allocated(named, "confirm")
        self._dirty[named] = False

    def require_clean(self, pages: ArrayLike) -> None:
        """Raise DirtyPageError if any of `pages` [any] is dirty, whoever holds it; PageIdError for a bad id."""
        named = self._checked(pages)
        # take, not indexing: twice as fast for the tens of thousands of int32 ids that a step maps.
        dirty = self._dirty.take(named)
        if dirty.any():
            raise DirtyPageError(f"{_listed(named[dirty])} dirty: scrub the reserved pages and confirm before building")

    def check_invariants(self, holders: ArrayLike) -> None:
        """Compare the books with the world: `holders` int [num_pages] counts the requests that hold each page.

        Raises InvariantError unless the free stack names each free page once and no other, free + live + cached is the
        usable pool, and every reference count is the number of holders, the cache being one more (so no free page is
        mapped anywhere). O(num_pages).
        """
        held = np.asarray(holders)
        if held.shape != (self.num_pages,):
            raise InvariantError(f"holders have shape {held.shape}: one count per page, [{self.num_pages}]")
        free_ids = self._free_stack[: self._free]
        times_free = np.bincount(free_ids, minlength=self.num_pages)
        self._require_none(times_free > 1, "more than once on the free stack")
        self._require_none((times_free > 0) & (self._references > 0), "both free and referenced")
        self._require_none((times_free > 0) & (held > 0), "free and mapped")
        by_requests = self._references - self._cached
        self._require_none(by_requests < 0, "cached and without a reference")
        if self._references[PADDING_PAGE] or times_free[PADDING_PAGE]:
            raise InvariantError(f"page {PADDING_PAGE} is dealt: it is padding and belongs to nobody")
        idle = self._cached & (by_requests == 0)
        live, cached = np.count_nonzero(by_requests), np.count_nonzero(idle)
        if self._free + live + cached != self.num_pages - 1:
            raise InvariantError(
                f"{self._free} free + {live} live + {cached} cached is not {self.num_pages - 1} usable: pages leaked"
            )
        self._require_none(by_requests != held, "referenced otherwise than held")
        queued = np.bincount(self._idle.oldest(self.num_pages), minlength=self.num_pages)
        self._require_none(queued != idle, "cached alone and not queued once, or queued otherwise")

    def _free_up(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        self._dirty[pages] = True
        self._epoch[pages] += 1
        self._free_stack[self._free : self._free + pages.size] = pages
        self._free += pages.size
        return pages

    def _refuse_retain(self, pages: NDArray[np.int32]) -> None:
        """Name what is wrong with caching pages, some of which cannot be."""
        self._require_allocated(pages, "cache")
        cached = pages[self._cached[pages]]
        if cached.size:
            raise PageCacheError(f"{_listed(cached)} cached already: the cache holds a page once")
        self.require_clean(pages)

    def _refuse_release(self, unheld: NDArray[np.int32]) -> None:
        """Name what is wrong with releasing pages that no request holds."""
        cached = unheld[self._cached[unheld]]
        if cached.size:
            raise DoubleFreeError(f"{_listed(cached)} held by the cache alone: each holder releases a page once")
        freed_before = unheld[self._epoch[unheld] > 0]
        if freed_before.size:
            raise DoubleFreeError(f"{_listed(freed_before)} already free: each holder releases a page once")
        raise PageNotAllocatedError(f"cannot release {_listed(unheld)}, never allocated: release what was dealt")

    def _require_none(self, wrong: NDArray[np.bool_], fault: str) -> None:
        if wrong.any():
            raise InvariantError(f"{_listed(np.flatnonzero(wrong))} {fault}: the page bookkeeping is broken")

    def _require_allocated(self, pages: NDArray[np.integer], verb: str) -> None:
        unheld = self._references[pages] == 0
        if unheld.any():
            raise PageNotAllocatedError(f"cannot {verb} {_listed(pages[unheld])}, free: {verb} allocated pages only")

    def _checked(self, pages: ArrayLike) -> NDArray[np.integer]:
        """`pages` as a flat integer array whose every id can be dealt by this pool."""
        ids = np.asarray(pages).reshape(-1)
        if ids.size == 0:
            return ids.astype(np.int32)
        if ids.dtype.kind not in "iu":
            raise PageIdError(f"page ids have dtype {ids.dtype}: pass integers")
        if ids.min() <= PADDING_PAGE or ids.max() >= self.num_pages:
            wrong = ids[(ids <= PADDING_PAGE) | (ids >= self.num_pages)]
            raise PageIdError(f"{_listed(wrong)} outside 1 .. {self.num_pages - 1} (page 0 is padding): pass dealt ids")
        return ids


def _distinct(ids: NDArray[np.integer]) -> NDArray[np.int32]:
    return (np.unique(ids) if ids.size > 1 else ids).astype(np.int32, copy=False)


def _read_only(array: NDArray) -> NDArray:
    view = array.view()
    view.flags.writeable = False
    return view


def _listed(pages: NDArray[np.integer]) -> str:
    """`pages 3, 8, 9, 12 and 5 more`: enough to find the fault, whatever the number."""
    shown = ", ".join(str(page) for page in pages[:_NAMED_PAGES])
    more = f" and {pages.size - _NAMED_PAGES} more" if pages.size > _NAMED_PAGES else ""
    return f"page{'s' if pages.size > 1 else ''} {shown}{more}"
