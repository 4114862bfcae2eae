"""Packed rows against a plain model of what the vendors' kernels read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import make_case

from kv_common.layout import PADDING_PAGE
from kv_common.page_table import KvPageTableV1
from kv_kernels.packed_rows import PackedRowsError, pack_rows
from kv_kernels.provider import PlanShape


def slots_seen_by_kernel(packed, tokens_per_page: int) -> list[list[int]]:
    """For every query of every row, the slots of the keys that it attends over, read as the kernels read them: a row's
    length from its page count and last page, its causal mask aligned at the end.
    """
    seen = []
    for row in range(len(packed.last_page_len)):
        pages = packed.page_ids[packed.page_indptr[row] : packed.page_indptr[row + 1]]
        length = (len(pages) - 1) * tokens_per_page + packed.last_page_len[row]
        slots = [pages[at // tokens_per_page] * tokens_per_page + at % tokens_per_page for at in range(length)]
        queries = packed.query_start[row + 1] - packed.query_start[row]
        seen += [slots[: length - queries + 1 + query] for query in range(queries)]
    return seen


def slots_of_table(table: KvPageTableV1) -> list[list[int]]:
    """The same, of the table."""
    seen = []
    for row in range(table.rows):
        pages = table.page_ids[table.page_indptr[row] : table.page_indptr[row + 1]]
        for token in range(table.query_start[row], table.query_start[row + 1]):
            size = table.tokens_per_page
            seen.append([pages[at // size] * size + at % size for at in range(table.positions[token] + 1)])
    return seen


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=4),
    tokens_per_page=st.sampled_from([1, 4, 16]),
    more_tokens=st.integers(0, 5),
    more_rows=st.integers(0, 3),
    each_a_row=st.booleans(),
)
def test_a_kernel_reads_the_keys_of_the_table(lengths, tokens_per_page, more_tokens, more_rows, each_a_row):
    kv_len = [before + new - 1 for before, new in lengths]
    table = make_case(
        0, kv_len=kv_len, query_len=[new for _, new in lengths], tokens_per_page=tokens_per_page, layers=1
    ).table
    tokens = table.tokens + more_tokens
    rows = tokens if each_a_row else min(tokens, table.rows + more_rows)
    shape = PlanShape(tokens, rows, rows * -(-max(kv_len) // tokens_per_page))
    packed = pack_rows(table, shape)
    seen = slots_seen_by_kernel(packed, tokens_per_page)
    assert seen[: table.tokens] == slots_of_table(table)
    # What is left is padding: it reads one key of the padding page or nothing at all.
    assert all(slots == [PADDING_PAGE * tokens_per_page] for slots in seen[table.tokens :])
    assert (np.diff(packed.page_indptr) >= 1).all()
    assert packed.page_indptr[-1] <= shape.page_entries == len(packed.page_ids)
    assert packed.num_tokens == table.tokens
    assert all(array.dtype == np.int32 for array in packed)


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        (PlanShape(8, 3, 6), "3 rows and 6 page entries: give 3 rows and 9 entries"),
        (PlanShape(8, 1, 9), "1 rows and 9 page entries: give 2 rows and 6 entries"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_the_numbers(shape, remedy):
    table = make_case(0, kv_len=[40, 3], query_len=[1, 3]).table
    with pytest.raises(PackedRowsError, match=f"2 rows of 4 pages, the longest of 3, do not fit {remedy}"):
        pack_rows(table, shape)
