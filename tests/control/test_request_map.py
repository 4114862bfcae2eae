"""The request map against a plain-Python model, and each of its refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_control.request_map import (
    NoFreeRowError,
    RequestHandle,
    RequestMap,
    RowMappingError,
    RowNotLiveError,
    RowOverflowError,
    StaleHandleError,
    ragged_ranges,
)

MAX_REQUESTS, MAX_PAGES, NUM_PAGES = 4, 6, 50


class RequestMapMachine(RuleBasedStateMachine):
    """A dict from handle to a list of pages says the same as the table."""

    def __init__(self):
        super().__init__()
        self.map = RequestMap(MAX_REQUESTS, MAX_PAGES)
        self.pages = {}
        self.closed = []
        self.next_id = 100

    @rule()
    def open(self):
        self.next_id += 1
        if len(self.pages) == MAX_REQUESTS:
            with pytest.raises(NoFreeRowError):
                self.map.open(self.next_id)
            return
        handle = self.map.open(self.next_id)
        assert handle.request_id == self.next_id
        assert handle.row not in {other.row for other in self.pages}
        self.pages[handle] = []

    @rule(data=st.data())
    def close(self, data):
        if self.pages:
            handle = data.draw(st.sampled_from(sorted(self.pages)))
            assert self.map.close(handle).tolist() == self.pages.pop(handle)
            self.closed.append(handle)

    @rule(data=st.data())
    def append(self, data):
        handles = data.draw(st.permutations(sorted(self.pages)))
        handles = handles[: data.draw(st.integers(0, len(handles)))]
        counts = [data.draw(st.integers(0, 3)) for _ in handles]
        pages = [data.draw(st.integers(1, NUM_PAGES - 1)) for _ in range(sum(counts))]
        rows = np.array([handle.row for handle in handles], np.int32)
        if any(len(self.pages[h]) + c > MAX_PAGES for h, c in zip(handles, counts, strict=True)):
            with pytest.raises(RowOverflowError):
                self.map.append_pages(rows, counts, pages)
            return
        self.map.append_pages(rows, counts, pages)
        for handle, count in zip(handles, counts, strict=True):
            self.pages[handle] += pages[:count]
            pages = pages[count:]

    @invariant()
    def the_table_agrees(self):
        expected = np.zeros((MAX_REQUESTS, MAX_PAGES), np.int32)
        holders = np.zeros(NUM_PAGES, np.int64)
        for handle, pages in self.pages.items():
            expected[handle.row, : len(pages)] = pages
            np.add.at(holders, pages, 1)
            assert self.map.row_of(handle) == handle.row
            assert self.map.handle_at(handle.row) == handle
            assert self.map.pages_of(handle.row).tolist() == pages
        assert np.array_equal(self.map.table, expected)
        assert np.array_equal(self.map.holders(NUM_PAGES), holders)
        assert self.map.live_requests == len(self.pages) == MAX_REQUESTS - self.map.free_rows
        rows = np.array([h.row for h in [*self.pages, *self.closed]], np.int64)
        epochs = np.array([h.epoch for h in [*self.pages, *self.closed]], np.int64)
        assert self.map.is_current(rows, epochs).tolist() == [True] * len(self.pages) + [False] * len(self.closed)
        for handle in self.closed:
            with pytest.raises(StaleHandleError):
                self.map.row_of(handle)


TestRequestMapAgainstItsModel = RequestMapMachine.TestCase
TestRequestMapAgainstItsModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_stale_handle_is_named_with_its_row_and_epochs():
    request_map = RequestMap(1, 4)
    first = request_map.open(7)
    request_map.close(first)
    with pytest.raises(StaleHandleError, match="request 7: row 0 at epoch 0 is now closed at epoch 1"):
        request_map.close(first)
    request_map.open(8)
    with pytest.raises(StaleHandleError, match="held by request 8 at epoch 1"):
        request_map.row_of(first)


@pytest.mark.parametrize("forged", [RequestHandle(7, 5, 0), RequestHandle(7, -1, 0), RequestHandle(9, 0, 0)])
def test_a_handle_that_was_never_given_out_is_stale(forged):
    request_map = RequestMap(2, 4)
    request_map.open(7)
    with pytest.raises(StaleHandleError):
        request_map.row_of(forged)


def test_a_closed_row_keeps_nothing_for_its_next_tenant():
    request_map = RequestMap(1, 4)
    handle = request_map.open(1)
    request_map.append_pages([0], [3], [5, 6, 7])
    held = request_map.close(handle)
    request_map.open(2)
    assert held.tolist() == [5, 6, 7]
    assert request_map.pages_of(0).size == 0
    assert not request_map.table.any()


def test_more_requests_than_rows_are_refused():
    request_map = RequestMap(1, 4)
    request_map.open(1)
    with pytest.raises(NoFreeRowError, match="all 1 rows are taken, none for request 2"):
        request_map.open(2)


@pytest.mark.parametrize(("requests", "pages"), [(0, 4), (4, 0)])
def test_an_empty_map_is_refused(requests, pages):
    with pytest.raises(RowMappingError, match="at least 1"):
        RequestMap(requests, pages)


@pytest.mark.parametrize(
    ("rows", "counts", "pages", "error"),
    [
        ([0, 1], [1, 4], [5, 6, 7, 8, 9], RowOverflowError),
        ([0, 2], [1, 1], [5, 6], RowNotLiveError),
        ([0, -1], [1, 1], [5, 6], RowNotLiveError),
        ([0, 9], [1, 1], [5, 6], RowNotLiveError),
        ([0, 0], [1, 1], [5, 6], RowMappingError),
        ([0, 1], [2, -1], [5], RowMappingError),
        ([0, 1], [1, 1], [5], RowMappingError),
        ([0, 1], [1], [5], RowMappingError),
        ([0, 1], [1, 1], [5, 0], RowMappingError),
        ([0.0, 1.0], [1, 1], [5, 6], RowMappingError),
        ([[0, 1]], [[1, 1]], [5, 6], RowMappingError),
    ],
)
def test_a_refused_append_changes_nothing(rows, counts, pages, error):
    request_map = RequestMap(3, 4)
    for request in range(2):
        request_map.open(request)
    request_map.append_pages([1], [1], [3])
    table, held = request_map.table.copy(), request_map.page_count.copy()
    with pytest.raises(error) as caught:
        request_map.append_pages(rows, counts, pages)
    assert "\n" not in str(caught.value)
    assert np.array_equal(request_map.table, table)
    assert np.array_equal(request_map.page_count, held)


def test_a_row_that_is_full_says_how_full():
    request_map = RequestMap(1, 4)
    request_map.open(1)
    with pytest.raises(RowOverflowError, match="row 0 would hold 5 pages of at most 4"):
        request_map.append_pages([0], [5], [1, 2, 3, 4, 5])


def test_rows_outside_the_map_are_not_current():
    request_map = RequestMap(2, 4)
    handle = request_map.open(1)
    rows = np.array([[handle.row, 1], [-2, 2]])
    assert request_map.is_current(rows, 0).tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("name", ["table", "page_count", "epoch", "live"])
def test_the_map_cannot_be_written_from_outside(name):
    with pytest.raises(ValueError, match="read-only"):
        getattr(RequestMap(2, 2), name)[0] = 1


def test_a_view_of_a_rows_pages_cannot_be_written():
    request_map = RequestMap(1, 2)
    request_map.open(1)
    request_map.append_pages([0], [1], [1])
    with pytest.raises(ValueError, match="read-only"):
        request_map.pages_of(0)[0] = 2


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 50), st.integers(0, 6)), max_size=8))
def test_ragged_ranges_are_the_ranges_one_after_the_other(pairs):
    starts, counts = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    expected = [start + i for start, count in pairs for i in range(count)]
    assert ragged_ranges(starts, counts).tolist() == expected
