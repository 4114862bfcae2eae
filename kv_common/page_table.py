"""One step's page bookkeeping, in host numpy: the seam between the control plane and the kernels.

Contract: plain int32 arrays that say which slots this step's tokens are written to and which pages each row attends
over. Real tokens and rows only: padding to a compiled shape, strides and any vendor's packing belong to the provider,
so every provider can be checked against the same table. `kv_len` counts this step's new tokens, because they are
appended before they are attended over. `validate` is vectorised but sorts the mapped pages, so it is for debug mode
and tests; the step builder makes tables that satisfy it by construction.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE

Int32Array = NDArray[np.int32]


class PageTableError(JaxkvError):
    """A page table that breaks an invariant; `invariant` is its name."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"page table breaks {invariant}: {detail}; build it with kv_control's StepBuilder")
        self.invariant = invariant


@dataclass(frozen=True, slots=True, eq=False)
class KvPageTableV1:
    """The page table of one step with `tokens` new tokens in `rows` sequences.

    Attributes:
        write_slots: [tokens] absolute slot of each new token, page * tokens_per_page + offset.
        positions: [tokens] position of each new token in its sequence, from 0.
        query_start: [rows + 1] row r's new tokens are query_start[r] to query_start[r + 1]; every row has at least one.
        page_indptr: [rows + 1] row r's pages are page_ids[page_indptr[r] : page_indptr[r + 1]], in sequence order.
        page_ids: [page_indptr[-1]] page numbers; the padding page for pages at the start of a row that lie wholly
            behind the window of all its queries, which were given back: a provider reads nothing of them.
        last_page_len: [rows] tokens in the row's last page after this step, 1 to tokens_per_page.
        kv_len: [rows] tokens that the row attends over, this step's included.
    """

    write_slots: Int32Array
    positions: Int32Array
    query_start: Int32Array
    page_indptr: Int32Array
    page_ids: Int32Array
    last_page_len: Int32Array
    kv_len: Int32Array
    tokens_per_page: int

    @property
    def tokens(self) -> int:
        """New tokens in this step."""
        return len(self.write_slots)

    @property
    def rows(self) -> int:
        """Sequences in this step."""
        return len(self.kv_len)

    def validate(self, num_pages: int, *, reach: int | None = None) -> None:
        """Raises PageTableError naming the first invariant that does not hold for a pool of `num_pages` pages, where a
        query sees `reach` tokens, itself included, or all.
        """
        self._validate_form()
        self._validate_rows()
        self._validate_pages(num_pages, reach)
        self._validate_tokens()

    def _validate_form(self) -> None:
        if self.tokens_per_page < 1:
            raise PageTableError("tokens_per_page_positive", f"tokens_per_page is {self.tokens_per_page}")
        for field in fields(self):
            array = getattr(self, field.name)
            if field.name == "tokens_per_page":
                continue
            if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
                raise PageTableError("int32_arrays", f"{field.name} is not a one-dimensional int32 numpy array")
            if not array.flags.c_contiguous:
                raise PageTableError("contiguous_arrays", f"{field.name} is a strided view")
        for name, expected in (
            ("positions", self.tokens),
            ("query_start", self.rows + 1),
            ("page_indptr", self.rows + 1),
            ("last_page_len", self.rows),
        ):
            if len(getattr(self, name)) != expected:
                raise PageTableError(
                    "array_lengths",
                    f"{name} has {len(getattr(self, name))} entries, not {expected}, "
                    f"for {self.tokens} tokens in {self.rows} rows",
                )

    def _validate_rows(self) -> None:
        if self.query_start[0] != 0 or self.query_start[-1] != self.tokens:
            raise PageTableError(
                "query_start_spans_tokens",
                f"query_start runs from {self.query_start[0]} to {self.query_start[-1]}, not from 0 to {self.tokens}",
            )
        query_len = np.diff(self.query_start)
        if (row := _first_false(query_len >= 1)) is not None:
            raise PageTableError("every_row_has_tokens", f"row {row} has {query_len[row]} new tokens")
        if (row := _first_false(self.kv_len >= query_len)) is not None:
            raise PageTableError(
                "kv_len_includes_new_tokens",
                f"row {row} has kv_len {self.kv_len[row]} but {query_len[row]} new tokens",
            )

    def _validate_pages(self, num_pages: int, reach: int | None) -> None:
        if self.page_indptr[0] != 0 or self.page_indptr[-1] != len(self.page_ids):
            raise PageTableError(
                "page_indptr_spans_page_ids",
                f"page_indptr runs from {self.page_indptr[0]} to {self.page_indptr[-1]}, "
                f"not from 0 to {len(self.page_ids)}",
            )
        page_count = np.diff(self.page_indptr)
        expected = -(-self.kv_len.astype(np.int64) // self.tokens_per_page)
        if (row := _first_false(page_count == expected)) is not None:
            raise PageTableError(
                "pages_cover_kv_len",
                f"row {row} maps {page_count[row]} pages but {self.kv_len[row]} tokens need {expected[row]}",
            )
        filled = self.kv_len - (expected - 1) * self.tokens_per_page
        if (row := _first_false(self.last_page_len == filled)) is not None:
            raise PageTableError(
                "last_page_len_matches_kv_len",
                f"row {row} has last_page_len {self.last_page_len[row]}, not {filled[row]}, "
                f"for {self.kv_len[row]} tokens",
            )
        if (entry := _first_false((self.page_ids >= 0) & (self.page_ids < num_pages))) is not None:
            raise PageTableError(
                "page_ids_in_pool", f"page_ids[{entry}] is {self.page_ids[entry]} in a pool of {num_pages} pages"
            )
        row_of_entry = np.repeat(np.arange(self.rows, dtype=np.int64), page_count)
        mapped = self.page_ids != PADDING_PAGE
        if (entry := _first_false(mapped | self._is_behind(row_of_entry, reach))) is not None:
            raise PageTableError("padding_page_unmapped", f"page_ids[{entry}] is the padding page {PADDING_PAGE}")
        keys = np.sort(row_of_entry[mapped] * num_pages + self.page_ids[mapped])
        if (key := _first_false(keys[1:] != keys[:-1])) is not None:
            row, page = divmod(int(keys[key]), num_pages)
            raise PageTableError("pages_distinct_in_row", f"row {row} maps page {page} more than once")

    def _is_behind(self, row_of_entry: NDArray[np.int64], reach: int | None) -> NDArray[np.bool_]:
        """Which entries [entries] no query of their row sees a token of."""
        if reach is None:
            return np.zeros(len(row_of_entry), np.bool_)
        oldest_seen = self.kv_len - np.diff(self.query_start) - reach + 1
        index = np.arange(len(row_of_entry)) - self.page_indptr[row_of_entry]
        behind: NDArray[np.bool_] = (index + 1) * self.tokens_per_page <= oldest_seen[row_of_entry]
        return behind

    def _validate_tokens(self) -> None:
        query_len = np.diff(self.query_start)
        row_of_token = np.repeat(np.arange(self.rows), query_len)
        first_position = (self.kv_len - self.query_start[1:])[row_of_token]
        expected = first_position + np.arange(self.tokens)
        if (token := _first_false(self.positions == expected)) is not None:
            raise PageTableError(
                "positions_end_at_kv_len",
                f"token {token} of row {row_of_token[token]} has position {self.positions[token]}, "
                f"not {expected[token]}",
            )
        page = self.page_ids[self.page_indptr[row_of_token] + self.positions // self.tokens_per_page].astype(np.int64)
        slots = page * self.tokens_per_page + self.positions % self.tokens_per_page
        if (token := _first_false(self.write_slots == slots)) is not None:
            raise PageTableError(
                "write_slots_follow_pages",
                f"token {token} of row {row_of_token[token]} writes slot {self.write_slots[token]}, not {slots[token]}",
            )
        ordered = np.sort(self.write_slots)
        if (entry := _first_false(ordered[1:] != ordered[:-1])) is not None:
            raise PageTableError("write_slots_distinct", f"slot {ordered[entry]} is written by more than one token")


def _first_false(holds: NDArray[np.bool_]) -> int | None:
    """Index of the first False in `holds` [n], or None."""
    if holds.all():
        return None
    return int(np.argmin(holds))
