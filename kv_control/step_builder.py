"""One step's page bookkeeping, in one order: reserve, scrub, confirm, build, run.

`reserve` deals and maps the pages that the step's tokens need, for all rows or for none. The caller overwrites the
dirty ones on the device and says so with `confirm`; `build` describes the step and refuses a page that is still dirty:
a missed scrub is an exception, not another request's K/V. This is the one place where pages pass between allocator and
request map, in both directions: `release_request` ends a request and frees what only it held.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE, KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1
from kv_control.page_allocator import PageAllocator
from kv_control.request_map import RequestHandle, RequestMap, ragged_ranges

# Pages looked up at a time. Temporaries of this size stay in the cache and on the heap; those of a whole step, at a
# million pages, grew and trimmed the heap every time, for a fifth of the step.
_BLOCK_PAGES = 1 << 15

_NO_PAGES: NDArray[np.int32] = np.zeros(0, np.int32)
_NO_EPOCHS: NDArray[np.int64] = np.zeros(0, np.int64)


class StepInputError(JaxkvError):
    """Rows and lengths that do not describe a step."""


class MissingPagesError(JaxkvError):
    """A row without the pages that its length after the step needs."""


class StaleReservationError(JaxkvError):
    """A reservation some of whose pages were freed, and may be another request's by now."""


class SharedPageError(JaxkvError):
    """A page about to be written that another request, or the cache, also holds."""


class Reservation(NamedTuple):
    """Pages newly mapped by one `reserve`, and those to scrub before `confirm`.

    `pages` int32 [new], in row order; `page_counts` int32 [rows], how many each row got; `dirty` int32 [<= new], the
    pages to overwrite; `dirty_epochs` int64 [dirty], their epochs when they were reserved.
    """

    pages: NDArray[np.int32]
    page_counts: NDArray[np.int32]
    dirty: NDArray[np.int32]
    dirty_epochs: NDArray[np.int64]


class StepBuilder:
    """Moves pages between `allocator` and `request_map` and describes steps over them."""

    def __init__(self, layout: KvStorageLayoutV1, allocator: PageAllocator, request_map: RequestMap) -> None:
        if allocator.num_pages != layout.num_pages:
            raise StepInputError(
                f"the allocator deals {allocator.num_pages} pages, the layout has {layout.num_pages}: "
                "build both from one layout"
            )
        self.layout = layout
        self.allocator = allocator
        self.request_map = request_map

    def pages_needed(self, rows: ArrayLike, kv_len: ArrayLike, new_tokens: ArrayLike) -> NDArray[np.int32]:
        """Pages that `reserve` would deal to each row: int32 [rows]. Raises for bad rows and lengths, as `reserve`."""
        at, before, added = self._checked(rows, kv_len, new_tokens)
        return self._missing(at, before + added)

    def reserve(self, rows: ArrayLike, kv_len: ArrayLike, new_tokens: ArrayLike) -> Reservation:
        """Map the pages that new_tokens [n] more tokens at rows [n] need, behind kv_len [n] tokens each.

        All rows or none: an error changes nothing. Raises OutOfPagesError, RowOverflowError, RowNotLiveError,
        RowMappingError, StepInputError.
        """
        at, before, added = self._checked(rows, kv_len, new_tokens)
        counts = self._missing(at, before + added)
        if not counts.any():
            return Reservation(_NO_PAGES, counts, _NO_PAGES, _NO_EPOCHS)  # as most steps of a decode
        self.request_map.require_room(at, counts)
        pages = self.allocator.allocate(int(counts.sum()))
        self.request_map.append_pages(at, counts, pages)
        dirty = pages[self.allocator.dirty[pages]]
        return Reservation(pages, counts, dirty, self.allocator.epoch[dirty])

    def confirm(self, reservation: Reservation) -> None:
        """Record that the device will overwrite `reservation.dirty` before anything reads it.

        Raises StaleReservationError when one of them was freed after it was reserved.
        """
        if not reservation.dirty.size:
            return
        stale = self.allocator.epoch[reservation.dirty] != reservation.dirty_epochs
        if stale.any():
            raise StaleReservationError(
                f"page {reservation.dirty[stale][0]} and {np.count_nonzero(stale) - 1} more were freed since the "
                "reservation: preempt before reserving, and confirm only what this step runs"
            )
        self.allocator.confirm_scrubbed(reservation.dirty)

    def build(self, rows: ArrayLike, kv_len: ArrayLike, new_tokens: ArrayLike) -> KvPageTableV1:
        """Describe the step that appends new_tokens [n] to rows [n] behind kv_len [n] tokens; changes nothing.

        Raises DirtyPageError when any page that the step maps is dirty, MissingPagesError when a row was not reserved
        far enough, and the errors of bad rows and lengths of `reserve`.
        """
        at, before, added = self._checked(rows, kv_len, new_tokens)
        after = before + added
        tokens_per_page = self.layout.tokens_per_page
        page_counts = -(-after // tokens_per_page)
        held = self.request_map.page_count[at]
        if (held < page_counts).any():
            first = int((held < page_counts).argmax())
            raise MissingPagesError(
                f"row {at[first]} holds {held[first]} pages, {after[first]} tokens need {page_counts[first]}: "
                "reserve before building"
            )
        page_indptr = _offsets(page_counts)
        page_ids = self._gather_clean(at, page_counts, page_indptr)
        positions = ragged_ranges(before, added).astype(np.int32)
        # A token's page is found in the list just gathered: the step cannot write what it did not check.
        page_of_token = page_ids[np.repeat(page_indptr[:-1], added) + positions // tokens_per_page]
        self._require_sole_holder(page_of_token)
        return KvPageTableV1(
            write_slots=page_of_token * np.int32(tokens_per_page) + positions % np.int32(tokens_per_page),
            positions=positions,
            query_start=_offsets(added),
            page_indptr=page_indptr,
            page_ids=page_ids,
            last_page_len=(after - (page_counts - 1) * tokens_per_page).astype(np.int32),
            kv_len=after.astype(np.int32),
            tokens_per_page=tokens_per_page,
        )

    def _require_sole_holder(self, written: NDArray[np.int32]) -> None:
        shared = self.allocator.reference_count.take(written) != 1
        if shared.any():
            page = written[shared][0]
            raise SharedPageError(
                f"page {page} has {self.allocator.reference_count[page]} holders and would be written: "
                "copy a shared page before writing behind it"
            )

    def release_request(self, handle: RequestHandle) -> NDArray[np.int32]:
        """End the request and drop its hold on its pages; return those that became free: int32 [<= pages held].

        Raises StaleHandleError.
        """
        # The allocator checks first: were it to object, the request would still be open and its pages still mapped.
        freed = self.allocator.release(self.request_map.held_pages(self.request_map.row_of(handle)))
        self.request_map.close(handle)
        return freed

    def _gather_clean(self, rows: NDArray, page_counts: NDArray, page_indptr: NDArray) -> NDArray[np.int32]:
        """The pages of `rows` [n], page_counts [n] of each, all that are held clean: int32 [page_indptr[-1]]."""
        page_ids = np.empty(page_indptr[-1], np.int32)
        any_given_back = self.request_map.first_held[rows].any()
        for first, last in pairwise(_row_blocks(page_indptr)):
            block = self.request_map.gather_pages(rows[first:last], page_counts[first:last])
            self.allocator.require_clean(block[block != PADDING_PAGE] if any_given_back else block)
            page_ids[page_indptr[first] : page_indptr[last]] = block
        return page_ids

    def _missing(self, rows: NDArray, kv_len_after: NDArray) -> NDArray[np.int32]:
        total = -(-kv_len_after // self.layout.tokens_per_page)
        return np.maximum(total - self.request_map.page_count[rows], 0).astype(np.int32)

    def _checked(self, rows: ArrayLike, kv_len: ArrayLike, new_tokens: ArrayLike) -> _Step:
        step = _Step(np.asarray(rows), np.asarray(kv_len), np.asarray(new_tokens))
        if step.kv_len.shape != step.rows.shape or step.new_tokens.shape != step.rows.shape:
            raise StepInputError(
                f"rows, kv_len and new_tokens have shapes {step.rows.shape}, {step.kv_len.shape}, "
                f"{step.new_tokens.shape}: pass one of each per row"
            )
        self.request_map.require_rows(step.rows)
        if step.rows.size == 0:
            return _Step(*(array.astype(np.int64) for array in step))
        if step.kv_len.dtype.kind not in "iu" or step.new_tokens.dtype.kind not in "iu":
            raise StepInputError(f"lengths have dtypes {step.kv_len.dtype}, {step.new_tokens.dtype}: pass integers")
        if step.kv_len.min() < 0 or step.new_tokens.min() < 1:
            raise StepInputError(
                f"kv_len down to {step.kv_len.min()}, new_tokens down to {step.new_tokens.min()}: "
                "a row of a step has a length of 0 or more and at least 1 new token"
            )
        return step


class _Step(NamedTuple):
    rows: NDArray
    kv_len: NDArray
    new_tokens: NDArray


def _row_blocks(page_indptr: NDArray) -> list[int]:
    """Bounds of runs of rows that have about `_BLOCK_PAGES` pages together."""
    rows, pages = page_indptr.size - 1, int(page_indptr[-1])
    inner = np.searchsorted(page_indptr[1:], np.arange(_BLOCK_PAGES, pages, _BLOCK_PAGES))
    return sorted({0, *inner.tolist(), rows})


def _offsets(counts: NDArray) -> NDArray[np.int32]:
    """Where each run of a flat ragged list starts, and where the last one ends: int32 [n + 1]."""
    offsets = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
