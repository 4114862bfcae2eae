"""KvPageTableV1.validate: accepts tables built by a naive reference, and names each invariant that is broken."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_common import KvPageTableV1, PageTableError

NUM_PAGES = 64


def table_of(rows: list[tuple[int, list[int]]], kv_len: list[int], tokens_per_page: int) -> KvPageTableV1:
    """The naive reference: `rows` holds (new tokens, pages) per row; loops over every token."""
    slots, positions, query_start, indptr, ids, last = [], [], [0], [0], [], []
    for (new_tokens, pages), length in zip(rows, kv_len, strict=True):
        for position in range(length - new_tokens, length):
            positions.append(position)
            slots.append(pages[position // tokens_per_page] * tokens_per_page + position % tokens_per_page)
        query_start.append(query_start[-1] + new_tokens)
        indptr.append(indptr[-1] + len(pages))
        ids.extend(pages)
        last.append(length - (len(pages) - 1) * tokens_per_page)
    arrays = (np.asarray(values, np.int32) for values in (slots, positions, query_start, indptr, ids, last, kv_len))
    return KvPageTableV1(*arrays, tokens_per_page=tokens_per_page)


@st.composite
def tables(draw: st.DrawFn, min_rows: int = 0) -> KvPageTableV1:
    tokens_per_page = draw(st.sampled_from([1, 2, 4, 16]))
    kv_len = draw(st.lists(st.integers(1, 20), min_size=min_rows, max_size=3))
    deck = draw(st.permutations(range(1, NUM_PAGES)))
    rows, dealt = [], 0
    for length in kv_len:
        count = -(-length // tokens_per_page)
        rows.append((draw(st.integers(1, length)), list(deck[dealt : dealt + count])))
        dealt += count
    return table_of(rows, kv_len, tokens_per_page)


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


def replace(table: KvPageTableV1, **arrays: object) -> KvPageTableV1:
    return dataclasses.replace(table, **arrays)


# Each breakage starts from any valid table with at least one row and breaks exactly the invariant it is filed under.
BREAKAGES: dict[str, Callable[[KvPageTableV1], KvPageTableV1]] = {
    "tokens_per_page_positive": lambda t: replace(t, tokens_per_page=0),
    "int32_arrays": lambda t: replace(t, page_ids=t.page_ids.astype(np.int64)),
    # Two entries even for one row: numpy calls a strided view of one entry contiguous.
    "contiguous_arrays": lambda t: replace(t, kv_len=np.repeat(np.r_[t.kv_len, t.kv_len], 2)[::2][: t.rows + 1]),
    "array_lengths": lambda t: replace(t, positions=t.positions[:-1]),
    "query_start_spans_tokens": lambda t: replace(t, query_start=changed(t.query_start, -1, t.tokens + 1)),
    "every_row_has_tokens": lambda t: table_of([(0, [1]), (1, [2])], [1, 1], t.tokens_per_page),
    "kv_len_includes_new_tokens": lambda t: replace(t, kv_len=changed(t.kv_len, 0, 0)),
    "page_indptr_spans_page_ids": lambda t: replace(t, page_ids=t.page_ids[:-1]),
    "pages_cover_kv_len": lambda t: replace(
        t, page_indptr=changed(t.page_indptr, -1, t.page_indptr[-1] + 1), page_ids=np.r_[t.page_ids, np.int32(1)]
    ),
    "last_page_len_matches_kv_len": lambda t: replace(t, last_page_len=t.last_page_len + np.int32(1)),
    "page_ids_in_pool": lambda t: replace(t, page_ids=changed(t.page_ids, -1, NUM_PAGES)),
    "padding_page_unmapped": lambda t: replace(t, page_ids=changed(t.page_ids, 0, 0)),
    "pages_distinct_in_row": lambda t: table_of([(1, [5, 5])], [t.tokens_per_page + 1], t.tokens_per_page),
    "positions_end_at_kv_len": lambda t: replace(t, positions=t.positions - np.int32(1)),
    "write_slots_follow_pages": lambda t: replace(t, write_slots=changed(t.write_slots, -1, t.write_slots[-1] + 1)),
    "write_slots_distinct": lambda t: table_of([(1, [5]), (1, [5])], [1, 1], t.tokens_per_page),
}


@given(tables())
def test_a_table_built_token_by_token_is_valid(table: KvPageTableV1) -> None:
    table.validate(NUM_PAGES)
    assert table.tokens == int(table.query_start[-1])


@pytest.mark.parametrize("invariant", BREAKAGES)
@settings(max_examples=30)  # of each of them
@given(table=tables(min_rows=1))
def test_a_broken_invariant_is_named(invariant: str, table: KvPageTableV1) -> None:
    with pytest.raises(PageTableError) as caught:
        BREAKAGES[invariant](table).validate(NUM_PAGES)
    assert caught.value.invariant == invariant
    assert f"page table breaks {invariant}: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_that_lands_in_another_rows_page_is_named_with_its_numbers() -> None:
    table = table_of([(2, [3]), (1, [4])], [2, 5], 16)
    stray = replace(table, write_slots=changed(table.write_slots, 2, 3 * 16 + 4))
    with pytest.raises(PageTableError, match=r"token 2 of row 1 writes slot 52, not 68"):
        stray.validate(NUM_PAGES)


def test_rows_may_share_pages_that_this_step_does_not_write() -> None:
    table_of([(1, [7, 3]), (1, [7, 4])], [17, 18], 16).validate(NUM_PAGES)


def test_a_step_without_rows_is_valid() -> None:
    table_of([], [], 16).validate(NUM_PAGES)


def test_the_padding_page_may_stand_for_pages_behind_every_window_and_for_no_others():
    table = table_of([(2, [5, 6, 7])], [11], 4)  # queries at 9 and 10
    given_back = replace(table, page_ids=changed(table.page_ids, 0, 0))
    given_back.validate(NUM_PAGES, reach=6)  # the older one sees 4 to 9
    for reach in (7, None):
        with pytest.raises(PageTableError, match="padding_page_unmapped"):
            given_back.validate(NUM_PAGES, reach=reach)
    with pytest.raises(PageTableError, match="padding_page_unmapped"):
        replace(table, page_ids=changed(table.page_ids, 1, 0)).validate(NUM_PAGES, reach=6)
