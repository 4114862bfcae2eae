"""The step builder against loops in plain Python, and the order reserve, scrub, confirm, build."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_common.layout import KvStorageLayoutV1
from kv_control.buckets import ShapeBuckets, page_entries, scrub_entries
from kv_control.page_allocator import DirtyPageError, DoubleFreeError, OutOfPagesError, PageAllocator
from kv_control.request_map import RequestMap, RowMappingError, RowNotLiveError, RowOverflowError, StaleHandleError
from kv_control.step_builder import (
    MissingPagesError,
    StaleReservationError,
    StepBuilder,
    StepInputError,
)


def make_builder(num_pages=32, max_requests=4, max_pages=16, tokens_per_page=4):
    layout = KvStorageLayoutV1(
        num_layers=1, num_kv_heads=1, head_dim=1, num_pages=num_pages, tokens_per_page=tokens_per_page
    )
    return StepBuilder(layout, PageAllocator(num_pages), RequestMap(max_requests, max_pages))


def open_rows(builder, count):
    return np.array([builder.request_map.open(request).row for request in range(count)], np.int32)


def books(builder):
    allocator, request_map = builder.allocator, builder.request_map
    arrays = (allocator.reference_count, allocator.epoch, allocator.dirty, request_map.table, request_map.page_count)
    return [allocator.free_pages, *(array.tolist() for array in arrays)]


def make_pool_dirty(builder):
    """Free every page once, so that whatever is dealt next is dirty."""
    builder.allocator.release(builder.allocator.allocate(builder.allocator.free_pages))


def naive_table(builder, rows, kv_len, new_tokens):
    """The step's table, a token and a page at a time."""
    size = builder.layout.tokens_per_page
    names = ("write_slots", "positions", "query_start", "page_indptr", "page_ids", "last_page_len", "kv_len")
    table = {name: [] for name in names}
    table["query_start"].append(0)
    table["page_indptr"].append(0)
    for row, before, new in zip(rows.tolist(), kv_len, new_tokens, strict=True):
        pages = builder.request_map.table[row].tolist()
        for position in range(before, before + new):
            table["positions"].append(position)
            table["write_slots"].append(pages[position // size] * size + position % size)
        table["query_start"].append(len(table["positions"]))
        total = before + new
        used = 0
        while used * size < total:
            table["page_ids"].append(pages[used])
            used += 1
        table["page_indptr"].append(len(table["page_ids"]))
        table["last_page_len"].append(total - (used - 1) * size)
        table["kv_len"].append(total)
    return table


@settings(max_examples=80, deadline=None)
@given(data=st.data(), tokens_per_page=st.sampled_from([1, 3, 4, 16]), block_pages=st.sampled_from([1, 5, 1 << 15]))
def test_a_history_of_steps_is_described_as_the_loops_describe_it(data, tokens_per_page, block_pages):
    with patch("kv_control.step_builder._BLOCK_PAGES", block_pages):
        run_history(data, tokens_per_page)


def run_history(data, tokens_per_page):
    """Open, extend and release requests at random; every step's table must be the naive one."""
    max_context = 40
    builder = make_builder(60, 5, -(-max_context // tokens_per_page), tokens_per_page)
    buckets = ShapeBuckets(max_rows=5, max_tokens=64, max_context=max_context, min_tokens=4, min_seqlen_k=8)
    handles, lengths = {}, {}
    for step in range(data.draw(st.integers(1, 8))):
        while builder.request_map.free_rows and data.draw(st.booleans()):
            handle = builder.request_map.open(step)
            handles[handle.row], lengths[handle.row] = handle, 0
        rows = data.draw(st.permutations(sorted(handles)))[: data.draw(st.integers(1, 5))]
        rows = np.array([row for row in rows if lengths[row] < max_context], np.int32)
        if not rows.size:
            continue
        kv_len = [lengths[row] for row in rows.tolist()]
        new = [data.draw(st.integers(1, min(12, max_context - length))) for length in kv_len]
        before = books(builder)
        needed = builder.pages_needed(rows, kv_len, new)
        assert books(builder) == before
        if needed.sum() > builder.allocator.free_pages:
            with pytest.raises(OutOfPagesError):
                builder.reserve(rows, kv_len, new)
            assert books(builder) == before
            handle = handles.pop(data.draw(st.sampled_from(sorted(handles))))
            builder.release_request(handle)
            del lengths[handle.row]
            continue
        reservation = builder.reserve(rows, kv_len, new)
        assert reservation.page_counts.tolist() == needed.tolist()
        assert set(reservation.dirty.tolist()) == {p for p in reservation.pages.tolist() if builder.allocator.dirty[p]}
        builder.confirm(reservation)
        table = builder.build(rows, kv_len, new)
        table.validate(builder.layout.num_pages)
        for name, expected in naive_table(builder, rows, kv_len, new).items():
            assert getattr(table, name).tolist() == expected, name
        shape = buckets.shape_for(sum(new), len(new), int(table.kv_len.max()))
        assert reservation.pages.size <= scrub_entries(shape, tokens_per_page)
        assert table.page_ids.size <= page_entries(shape, tokens_per_page)
        lengths.update(zip(rows.tolist(), table.kv_len.tolist(), strict=True))
        builder.allocator.check_invariants(builder.request_map.holders(builder.layout.num_pages))
    for handle in handles.values():
        builder.release_request(handle)
    assert builder.allocator.free_pages == builder.layout.usable_pages


def test_decode_steps_take_a_page_only_when_one_is_full():
    builder = make_builder()
    rows = open_rows(builder, 2)
    builder.reserve(rows, [0, 0], [4, 5])
    reservation = builder.reserve(rows, [4, 5], [1, 1])
    assert reservation.page_counts.tolist() == [1, 0]
    assert builder.request_map.page_count[rows].tolist() == [2, 2]


def test_a_missed_scrub_is_an_exception_and_not_another_requests_kv():
    builder = make_builder()
    make_pool_dirty(builder)
    rows = open_rows(builder, 2)
    reservation = builder.reserve(rows, [0, 0], [6, 3])
    assert sorted(reservation.dirty.tolist()) == sorted(reservation.pages.tolist())
    with pytest.raises(DirtyPageError, match="scrub the reserved pages and confirm"):
        builder.build(rows, [0, 0], [6, 3])
    builder.confirm(reservation)
    builder.build(rows, [0, 0], [6, 3]).validate(builder.layout.num_pages)


@pytest.mark.parametrize("block_pages", [1, 2, 1 << 15])
@pytest.mark.parametrize("entry", range(6))
def test_one_dirty_page_anywhere_in_the_context_of_a_step_is_refused(entry, block_pages, monkeypatch):
    monkeypatch.setattr("kv_control.step_builder._BLOCK_PAGES", block_pages)
    builder = make_builder()
    rows = open_rows(builder, 2)
    reservation = builder.reserve(rows, [0, 0], [12, 12])
    builder.allocator._dirty[reservation.pages[entry]] = True
    with pytest.raises(DirtyPageError, match=f"page {reservation.pages[entry]} dirty"):
        builder.build(rows, [11, 11], [1, 1])


def test_a_page_freed_while_still_mapped_is_refused():
    builder = make_builder()
    rows = open_rows(builder, 1)
    reservation = builder.reserve(rows, [0], [8])
    builder.allocator.release(reservation.pages[:1])
    with pytest.raises(DirtyPageError):
        builder.build(rows, [7], [1])


def test_a_dirty_page_of_a_row_outside_the_step_delays_nobody():
    builder = make_builder()
    make_pool_dirty(builder)
    rows = open_rows(builder, 2)
    first = builder.reserve(rows[:1], [0], [4])
    builder.reserve(rows[1:], [0], [4])
    builder.confirm(first)
    builder.build(rows[:1], [0], [4]).validate(builder.layout.num_pages)


@pytest.mark.parametrize(
    ("rows", "kv_len", "new_tokens", "error"),
    [
        ([0, 1], [0, 0], [4, 400], RowOverflowError),
        ([0, 1], [0, 0], [60, 60], OutOfPagesError),
        ([0, 2], [0, 0], [4, 4], RowNotLiveError),
        ([0, 0], [0, 0], [4, 4], RowMappingError),
        ([0, 1], [0, -1], [4, 4], StepInputError),
        ([0, 1], [0, 0], [4, 0], StepInputError),
        ([0, 1], [0], [4, 4], StepInputError),
        ([0, 1], [0, 0], [4], StepInputError),
        ([0, 1], [0, 0], [4, 4.5], StepInputError),
    ],
)
def test_a_failed_reservation_changes_nothing(rows, kv_len, new_tokens, error):
    builder = make_builder(num_pages=16)
    make_pool_dirty(builder)
    open_rows(builder, 2)
    before = books(builder)
    with pytest.raises(error) as caught:
        builder.reserve(rows, kv_len, new_tokens)
    assert "\n" not in str(caught.value)
    assert books(builder) == before


def test_a_row_without_the_pages_of_its_new_length_is_refused():
    builder = make_builder()
    rows = open_rows(builder, 2)
    builder.reserve(rows, [0, 0], [4, 4])
    with pytest.raises(MissingPagesError, match="row 1 holds 1 pages, 5 tokens need 2"):
        builder.build(rows, [3, 4], [1, 1])


def test_a_row_may_hold_more_pages_than_its_step_needs():
    builder = make_builder()
    rows = open_rows(builder, 1)
    builder.reserve(rows, [0], [16])
    table = builder.build(rows, [0], [3])
    assert table.page_ids.size == 1
    table.validate(builder.layout.num_pages)
    assert builder.reserve(rows, [3], [5]).pages.size == 0


def test_a_reservation_whose_pages_went_to_another_request_cannot_be_confirmed():
    builder = make_builder(num_pages=3)
    make_pool_dirty(builder)
    victim = builder.request_map.open(1)
    stale = builder.reserve([victim.row], [0], [8])
    builder.release_request(victim)
    heir = builder.request_map.open(2)
    builder.reserve([heir.row], [0], [8])
    with pytest.raises(StaleReservationError):
        builder.confirm(stale)
    with pytest.raises(DirtyPageError):
        builder.build([heir.row], [0], [8])


def test_an_ended_request_gives_back_what_only_it_held():
    builder = make_builder()
    handle = builder.request_map.open(1)
    pages = builder.reserve([handle.row], [0], [12]).pages
    builder.allocator.share(pages[:1])
    assert builder.release_request(handle).tolist() == sorted(pages[1:].tolist())
    assert builder.allocator.reference_count[pages].tolist() == [1, 0, 0]
    with pytest.raises(StaleHandleError):
        builder.release_request(handle)


def test_a_double_free_leaves_the_request_open():
    builder = make_builder()
    handle = builder.request_map.open(1)
    pages = builder.reserve([handle.row], [0], [8]).pages
    builder.allocator.release(pages)
    before = books(builder)
    with pytest.raises(DoubleFreeError):
        builder.release_request(handle)
    assert books(builder) == before
    assert builder.request_map.row_of(handle) == handle.row


def test_an_allocator_of_another_size_is_refused():
    layout = KvStorageLayoutV1(num_layers=1, num_kv_heads=1, head_dim=1, num_pages=8)
    with pytest.raises(StepInputError, match="deals 9 pages, the layout has 8"):
        StepBuilder(layout, PageAllocator(9), RequestMap(1, 1))


def test_a_step_without_rows_is_an_empty_table():
    builder = make_builder()
    builder.confirm(builder.reserve([], [], []))
    table = builder.build([], [], [])
    assert table.page_ids.size == table.write_slots.size == table.kv_len.size == 0
    assert table.query_start.tolist() == table.page_indptr.tolist() == [0]
