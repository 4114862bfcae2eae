"""The work of a step, as the Triton kernels read it: everything once, and nothing of the padding."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import build_table

from kv_kernels.pallas.plan import NO_KEY, SPLIT_KEYS, TILE_TOKENS, PallasPlan, make_plan
from kv_kernels.provider import PlanShape


def table_of(kv_len: list[int], query_len: list[int], tokens_per_page: int = 16):
    counts = [-(-length // tokens_per_page) for length in kv_len]
    ends = np.cumsum(counts)
    pages = [np.arange(1 + end - count, 1 + end) for end, count in zip(ends, counts, strict=True)]
    return build_table(kv_len, query_len, pages, tokens_per_page)


@st.composite
def steps(draw):
    kv_len = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=6))
    query_len = [draw(st.one_of(st.just(1), st.integers(1, min(total, 200)))) for total in kv_len]
    table = table_of(kv_len, query_len, draw(st.sampled_from([1, 16, 200])))
    padding = draw(st.integers(0, 100))
    tokens = table.tokens + padding
    rows = tokens if draw(st.booleans()) else min(tokens, table.rows + draw(st.integers(0, 9)))
    return table, PlanShape(tokens, rows, len(table.page_ids) + draw(st.integers(0, 500)))


@settings(max_examples=100)
@given(steps())
def test_every_token_meets_every_key_that_it_sees_once(step):
    table, shape = step
    plan = make_plan(table, shape)
    row = np.repeat(np.arange(table.rows), np.diff(table.query_start))
    written = np.zeros(shape.tokens, int)
    for start, length, position, first_entry in plan.tiles.T:
        assert length <= TILE_TOKENS
        written[start : start + length] += 1
        for token in range(start, start + length):
            if token < table.tokens:
                assert position + token - start == table.positions[token]
                assert first_entry == table.page_indptr[row[token]]
            else:
                assert position + length <= 0  # before every key
    for entry, (token, position, first_entry) in enumerate(plan.entries.T):
        first, last = plan.entry_splits[entry : entry + 2]
        if token < 0 or token >= table.tokens:
            assert first == last
        else:
            assert (position, first_entry) == (table.positions[token], table.page_indptr[row[token]])
            assert (plan.splits[0, first:last] == entry).all()
            keys = int(plan.split_keys[0])
            np.testing.assert_array_equal(plan.splits[1, first:last], np.arange(0, position + 1, keys))
        if token >= 0:
            written[token] += 1
    assert (written == 1).all()
    assert (plan.splits[1, plan.entry_splits[-1] :] == NO_KEY).all()
    np.testing.assert_array_equal(plan.page_ids[: len(table.page_ids)], table.page_ids)


def test_plans_of_one_shape_are_alike_and_int32():
    shape = PlanShape(tokens=16, rows=4, page_entries=60)
    steps = [([300], [3]), ([9, 40, 300], [9, 1, 1]), ([1, 1, 1, 1], [1, 1, 1, 1]), ([300], [16])]
    plans = [make_plan(table_of(*step), shape) for step in steps]
    for field in PallasPlan._fields:
        arrays = [getattr(plan, field) for plan in plans]
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
        assert len({array.shape for array in arrays}) == 1


def test_splits_begin_at_the_same_keys_in_any_company():
    for others in ([], [40], [3000, 9]):
        plan = make_plan(table_of([1000, *others], [1] * (1 + len(others))), PlanShape(8, 8, 400))
        first, last = plan.entry_splits[:2]
        np.testing.assert_array_equal(plan.splits[1, first:last], np.arange(0, 1000, SPLIT_KEYS))
