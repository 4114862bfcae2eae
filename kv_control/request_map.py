"""Which pages each live request holds, in order: one dense int32 table, one row a request.

A row is reused, so a request is named by a handle that carries the row's epoch; the epoch moves on when the row is
closed, and an old handle raises instead of touching the row's next tenant. The map records pages and neither deals nor
frees them: `close` hands back what the row held. Batch operations take whole arrays of rows, and an error changes
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE


class NoFreeRowError(JaxkvError):
    """Every row is taken."""


class StaleHandleError(JaxkvError):
    """A handle whose request was closed, or that this map never gave out."""


class RowNotLiveError(JaxkvError):
    """A row that no open request owns."""


class RowOverflowError(JaxkvError):
    """More pages than one row of the table can hold."""


class RowMappingError(JaxkvError):
    """Rows, counts and pages that do not describe one mapping."""


class RequestHandle(NamedTuple):
    """One open request: valid while the row's epoch is still `epoch`."""

    request_id: int
    row: int
    epoch: int


class RequestMap:
    """The pages of up to `max_requests` live requests, up to `max_pages_per_request` each.

    Read-only arrays: `table` int32 [max_requests, max_pages_per_request] (unmapped entries are page 0), `page_count`
    and `first_held` int32, `epoch` int64 and `live` bool [max_requests]. A row's pages before `first_held` were given
    back: they count, and their entries are page 0.
    """

    def __init__(self, max_requests: int, max_pages_per_request: int) -> None:
        if max_requests < 1 or max_pages_per_request < 1:
            raise RowMappingError(
                f"a map of {max_requests} requests of {max_pages_per_request} pages: both must be at least 1"
            )
        self.max_requests = max_requests
        self.max_pages_per_request = max_pages_per_request
        self._table = np.full((max_requests, max_pages_per_request), PADDING_PAGE, np.int32)
        self._page_count = np.zeros(max_requests, np.int32)
        self._first_held = np.zeros(max_requests, np.int32)
        self._epoch = np.zeros(max_requests, np.int64)
        self._live = np.zeros(max_requests, np.bool_)
        self._request_id = np.zeros(max_requests, np.int64)
        self._free_rows = np.arange(max_requests - 1, -1, -1, dtype=np.int32)
        self._free = max_requests
        self._last_seen = np.zeros(max_requests, np.int64)  # scratch of require_rows
        self.table = _read_only(self._table)
        self.page_count = _read_only(self._page_count)
        self.first_held = _read_only(self._first_held)
        self.epoch = _read_only(self._epoch)
        self.live = _read_only(self._live)

    @property
    def live_requests(self) -> int:
        """Rows that are taken."""
        return self.max_requests - self._free

    @property
    def free_rows(self) -> int:
        """Requests that can still be opened."""
        return self._free

    def open(self, request_id: int) -> RequestHandle:
        """Give `request_id` an empty row. Raises NoFreeRowError."""
        if self._free == 0:
            raise NoFreeRowError(
                f"all {self.max_requests} rows are taken, none for request {request_id}: close one first"
            )
        self._free -= 1
        row = int(self._free_rows[self._free])
        self._live[row] = True
        self._request_id[row] = request_id
        return self.handle_at(row)

    def close(self, handle: RequestHandle) -> NDArray[np.int32]:
        """End the request and return the pages it held, in order: int32 [pages]. Raises StaleHandleError.

        The caller owes the allocator a release of them; `StepBuilder.release_request` does both.
        """
        row = self.row_of(handle)
        pages = self.held_pages(row).copy()
        self._table[row, : self._page_count[row]] = PADDING_PAGE
        self._page_count[row] = self._first_held[row] = 0
        self._live[row] = False
        self._epoch[row] += 1
        self._free_rows[self._free] = row
        self._free += 1
        return pages

    def row_of(self, handle: RequestHandle) -> int:
        """The row of an open request. Raises StaleHandleError."""
        request_id, row, epoch = handle
        if not 0 <= row < self.max_requests:
            raise StaleHandleError(f"request {request_id}: row {row} is outside 0 .. {self.max_requests - 1}")
        if not self._live[row] or self._epoch[row] != epoch or self._request_id[row] != request_id:
            state = f"held by request {self._request_id[row]}" if self._live[row] else "closed"
            raise StaleHandleError(
                f"request {request_id}: row {row} at epoch {epoch} is now {state} at epoch {self._epoch[row]}: "
                "drop the handle when its request ends"
            )
        return row

    def handle_at(self, row: int) -> RequestHandle:
        """The handle of the request that owns `row`. Raises RowNotLiveError."""
        self.require_rows(np.array([row]))
        return RequestHandle(int(self._request_id[row]), int(row), int(self._epoch[row]))

    def is_current(self, rows: ArrayLike, epochs: ArrayLike) -> NDArray[np.bool_]:
        """Whether each (row, epoch) still names an open request: bool, in the shape of the arguments."""
        at = np.asarray(rows)
        inside = (at >= 0) & (at < self.max_requests)
        safe = np.where(inside, at, 0)
        return inside & self._live[safe] & (self._epoch[safe] == np.asarray(epochs))

    def pages_of(self, row: int) -> NDArray[np.int32]:
        """The pages of `row` in token order: a read-only view, int32 [page_count[row]]."""
        return self.table[row, : self._page_count[row]]

    def held_pages(self, row: int) -> NDArray[np.int32]:
        """Those of them that were not given back: a read-only view."""
        return self.table[row, self._first_held[row] : self._page_count[row]]

    def give_back(self, row: int, first_held: int) -> NDArray[np.int32]:
        """Let go of the pages of `row` before index `first_held` and return them: int32 [<= first_held].

        The caller owes the allocator a release of them. Raises RowMappingError beyond what the row holds.
        """
        start = int(self._first_held[row])
        if not start <= first_held <= self._page_count[row]:
            raise RowMappingError(
                f"row {row} holds pages {start} .. {self._page_count[row]}, it cannot give back those before "
                f"{first_held}"
            )
        pages = self._table[row, start:first_held].copy()
        self._table[row, start:first_held] = PADDING_PAGE
        self._first_held[row] = first_held
        return pages

    def append_pages(self, rows: ArrayLike, counts: ArrayLike, pages: ArrayLike) -> None:
        """Map the next counts[i] of `pages` [sum counts] behind the pages that rows[i] [n] already holds.

        Raises RowNotLiveError, RowMappingError (a row twice, a negative count, the wrong number of pages, a page below
        1) and RowOverflowError.
        """
        at, added = np.asarray(rows), np.asarray(counts)
        new_pages = np.asarray(pages, np.int32)
        self.require_room(at, added)
        total = int(added.sum())
        if new_pages.shape != (total,):
            raise RowMappingError(f"counts add up to {total}, pages have shape {new_pages.shape}: pass one page each")
        if total == 0:
            return
        if new_pages.min() <= PADDING_PAGE:
            raise RowMappingError(f"page {new_pages.min()} cannot be mapped: pages start at {PADDING_PAGE + 1}")
        # Entry j of the flat list belongs to row i and lands at page_count + (j - first entry of row i).
        columns = ragged_ranges(self._page_count[at], added)
        self._table[np.repeat(at, added), columns] = new_pages
        self._page_count[at] += added.astype(np.int32)

    def replace_pages(self, row: int, start: int, pages: ArrayLike) -> None:
        """Map `pages` [n] in the place of those that `row` holds from index `start` on.

        The caller owns the references on both sides. Raises RowMappingError where the row does not hold so many.
        """
        new_pages = np.asarray(pages, np.int32)
        end = start + new_pages.size
        if start < 0 or end > self._page_count[row]:
            raise RowMappingError(f"pages {start} .. {end} of row {row}, which holds {self._page_count[row]}")
        self._table[row, start:end] = new_pages

    def require_room(self, rows: NDArray, counts: NDArray) -> None:
        """Check that `append_pages` could map counts [n] more pages at rows [n]; the same errors, changing nothing."""
        self.require_rows(rows)
        if counts.shape != rows.shape:
            raise RowMappingError(f"counts have shape {counts.shape}, rows {rows.shape}: pass one count per row")
        if rows.size == 0:
            return
        if counts.min() < 0:
            raise RowMappingError(f"count {counts.min()} is negative: pages are only appended")
        after = self._page_count[rows] + counts
        if after.max() > self.max_pages_per_request:
            worst = int(after.argmax())
            raise RowOverflowError(
                f"row {rows[worst]} would hold {after[worst]} pages of at most {self.max_pages_per_request}: "
                "finish the request at the context limit"
            )

    def require_rows(self, rows: NDArray) -> None:
        """Check that `rows` [n] are distinct open rows. Raises RowNotLiveError, RowMappingError. O(n)."""
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise RowMappingError(f"rows have shape {rows.shape}, dtype {rows.dtype}: pass a flat integer array")
        if rows.size == 0:
            return
        if rows.min() < 0 or rows.max() >= self.max_requests:
            raise RowNotLiveError(f"rows span {rows.min()} .. {rows.max()}, outside 0 .. {self.max_requests - 1}")
        if not self._live[rows].all():
            raise RowNotLiveError(f"row {rows[~self._live[rows]][0]} belongs to no open request: open one first")
        # A row named twice remembers only its last index, so the first no longer reads back.
        order = np.arange(rows.size)
        self._last_seen[rows] = order
        repeated = self._last_seen[rows] != order
        if repeated.any():
            raise RowMappingError(f"row {rows[repeated][0]} is named more than once: name each row of a step once")

    def gather_pages(self, rows: NDArray, counts: NDArray) -> NDArray[np.int32]:
        """The first counts[i] pages of each rows[i], one after the other: int32 [sum counts]; page 0 where given back.

        The caller has checked the rows and that they hold as many.
        """
        return self._table.reshape(-1).take(ragged_ranges(rows.astype(np.int64) * self.max_pages_per_request, counts))

    def holders(self, num_pages: int) -> NDArray[np.int64]:
        """How many rows hold each page: int64 [num_pages], for `PageAllocator.check_invariants`. O(rows x pages)."""
        index = np.arange(self.max_pages_per_request)
        mapped = (index >= self._first_held[:, None]) & (index < self._page_count[:, None])
        return np.bincount(self._table[mapped], minlength=num_pages)


def ragged_ranges(starts: NDArray, counts: NDArray) -> NDArray[np.int64]:
    """starts[i], starts[i] + 1, ... counts[i] of them, for every i in turn: int64 [sum counts]."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    ranges = np.repeat(starts - (ends - counts), counts)
    ranges += np.arange(total)
    return ranges


def _read_only(array: NDArray) -> NDArray:
    view = array.view()
    view.flags.writeable = False
    return view
