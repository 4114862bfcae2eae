"""Rows of a step as the GPU vendors' kernels read them: page counts summed up, and how full each last page is.

Contract: a row of padding holds one page, the padding page, of one token, because kernels compute a row's length as
(pages - 1) * tokens_per_page + last_page_len, which no row without a page fits. Where a step has as many tokens as
rows, every token is a row of its own, its pages ending at its position: a decode kernel reads token i against row i,
and a short mixed step can have such a shape too. Otherwise rows of padding have no queries.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE
from kv_common.page_table import KvPageTableV1
from kv_kernels.provider import PlanShape


class PackedRowsError(JaxkvError):
    """A step that does not fit the shape it is packed to."""


class PackedRows(NamedTuple):
    """int32; numpy on the host, or jax arrays where a foreign runtime's metadata was packed."""

    num_tokens: Any  # [] tokens that are no padding
    query_start: Any  # [rows + 1]
    page_indptr: Any  # [rows + 1]
    page_ids: Any  # [page_entries] pages of layer 0
    last_page_len: Any  # [rows]


def tokens_are_rows(shape: PlanShape) -> bool:
    """Whether every token of a step of `shape` is a row of its own."""
    return shape.tokens == shape.rows


def longest_kv(shape: PlanShape, tokens_per_page: int) -> int:
    """Keys that a row of `shape` can have: its share of the page entries."""
    return max(1, shape.page_entries // shape.rows) * tokens_per_page


def pack_rows(table: KvPageTableV1, shape: PlanShape) -> PackedRows:
    """The rows of `table`, padded to `shape`. Raises PackedRowsError where they do not fit."""
    each_a_row = tokens_are_rows(shape)
    page_count, page_ids, last_page_len = np.diff(table.page_indptr), table.page_ids, table.last_page_len
    if each_a_row and table.tokens != table.rows:
        row = np.repeat(np.arange(table.rows), np.diff(table.query_start))
        page_count = table.positions // table.tokens_per_page + 1
        page_ids = table.page_ids[_ranges(table.page_indptr[row], page_count)]
        last_page_len = table.positions % table.tokens_per_page + 1
    rows, longest = len(page_count), int(page_count.max(initial=0))
    # A row longer than its share would be longer than kernels are told that rows can be.
    width = max(rows, shape.rows)
    needed = max(len(page_ids) + width - rows, longest * width)
    if rows > shape.rows or needed > shape.page_entries:
        raise PackedRowsError(
            f"{rows} rows of {len(page_ids)} pages, the longest of {longest}, do not fit {shape.rows} rows and "
            f"{shape.page_entries} page entries: give {width} rows and {needed} entries"
        )
    query_start = np.arange(shape.rows + 1) if each_a_row else _filled(table.query_start, shape.rows + 1, table.tokens)
    return PackedRows(
        num_tokens=np.asarray(table.tokens, np.int32),
        query_start=query_start.astype(np.int32),
        page_indptr=np.concatenate(([0], np.cumsum(_filled(page_count, shape.rows, 1)))).astype(np.int32),
        page_ids=_filled(page_ids, shape.page_entries, PADDING_PAGE),
        last_page_len=_filled(last_page_len, shape.rows, 1),
    )


def _filled(values: NDArray[np.int32], size: int, fill: int) -> NDArray[np.int32]:
    filled = np.full(size, fill, np.int32)
    filled[: len(values)] = values
    return filled


def _ranges(start: NDArray[np.int32], count: NDArray[np.int32]) -> NDArray[np.int64]:
    """start[i], start[i] + 1, ... `count[i]` times, one after another."""
    first = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(start - first, count)
