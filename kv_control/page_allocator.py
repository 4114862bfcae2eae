"""Who owns each page of the pool: a free stack, reference counts, epochs and dirty bits.

One call speaks for one holder, so a page named twice in a call counts once; two holders are two calls. Arguments are
checked before anything changes: an error leaves the allocator as it was. A page becomes dirty when its last reference
goes and stays so, through the next allocation, until `confirm_scrubbed`: only its new owner can say that the previous
owner's K/V is gone. Costs follow the pages named in a call, never the size of the pool. Page 0 is padding, never dealt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE

_NAMED_PAGES = 4  # how many offending pages an error message lists


class PageIdError(JaxkvError):
    """A page id that no pool of this size can deal: negative, too large, the padding page, or not an integer."""


class PageNotAllocatedError(JaxkvError):
    """A free page that was never allocated, or that cannot be shared or confirmed because nobody holds it."""


class DoubleFreeError(JaxkvError):
    """A page released after its last reference had already gone."""


class DirtyPageError(JaxkvError):
    """A page about to be read that may still hold its previous owner's K/V."""


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

    `reference_count` int32, `epoch` int64 (how often the page has been freed) and `dirty` bool are read-only arrays of
    shape [num_pages].
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
        self.reference_count = _read_only(self._references)
        self.epoch = _read_only(self._epoch)
        self.dirty = _read_only(self._dirty)

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self._free

    @property
    def live_pages(self) -> int:
        """Pages with at least one reference."""
        return self.num_pages - 1 - self._free

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
        named = self._distinct(pages)
        self._require_allocated(named, "share")
        self._references[named] += 1

    def release(self, pages: ArrayLike) -> NDArray[np.int32]:
        """Drop one holder of `pages` [any]; return those that became free, ascending: int32 [<= pages].

        The freed pages are dirty and their epochs have moved on. Raises PageIdError, DoubleFreeError and
        PageNotAllocatedError.
        """
        named = self._distinct(pages)
        references = self._references[named]
        unheld = named[references == 0]
        if unheld.size:
            freed_before = unheld[self._epoch[unheld] > 0]
            if freed_before.size:
                raise DoubleFreeError(f"{_listed(freed_before)} already free: each holder releases a page once")
            raise PageNotAllocatedError(f"cannot release {_listed(unheld)}, never allocated: release what was dealt")
        self._references[named] = references - 1
        freed = named[references == 1]
        self._dirty[freed] = True
        self._epoch[freed] += 1
        self._free_stack[self._free : self._free + freed.size] = freed
        self._free += freed.size
        return freed

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
        """Compare the books with the world: `holders` int [num_pages] counts who holds each page. O(num_pages).

        Raises InvariantError unless the free stack names each free page once and no other, free + live is the usable
        pool, and every reference count is the number of holders (so no free page is mapped anywhere).
        """
        held = np.asarray(holders)
        if held.shape != (self.num_pages,):
            raise InvariantError(f"holders have shape {held.shape}: one count per page, [{self.num_pages}]")
        free_ids = self._free_stack[: self._free]
        times_free = np.bincount(free_ids, minlength=self.num_pages)
        self._require_none(times_free > 1, "more than once on the free stack")
        self._require_none((times_free > 0) & (self._references > 0), "both free and referenced")
        self._require_none((times_free > 0) & (held > 0), "free and mapped")
        live = int(np.count_nonzero(self._references))
        if self._references[PADDING_PAGE] or times_free[PADDING_PAGE]:
            raise InvariantError(f"page {PADDING_PAGE} is dealt: it is padding and belongs to nobody")
        if self._free + live != self.num_pages - 1:
            raise InvariantError(f"{self._free} free + {live} live is not {self.num_pages - 1} usable: pages leaked")
        self._require_none(self._references != held, "referenced otherwise than held")

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

    def _distinct(self, pages: ArrayLike) -> NDArray[np.int32]:
        return np.unique(self._checked(pages)).astype(np.int32, copy=False)


def _read_only(array: NDArray) -> NDArray:
    view = array.view()
    view.flags.writeable = False
    return view


def _listed(pages: NDArray[np.integer]) -> str:
    """`pages 3, 8, 9, 12 and 5 more`: enough to find the fault, whatever the number."""
    shown = ", ".join(str(page) for page in pages[:_NAMED_PAGES])
    more = f" and {pages.size - _NAMED_PAGES} more" if pages.size > _NAMED_PAGES else ""
    return f"page{'s' if pages.size > 1 else ''} {shown}{more}"
