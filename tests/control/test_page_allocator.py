"""The page allocator against a plain-Python model, and each of its refusals."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_control.page_allocator import (
    DirtyPageError,
    DoubleFreeError,
    InvariantError,
    OutOfPagesError,
    PageAllocator,
    PageCacheError,
    PageIdError,
    PageNotAllocatedError,
)


class ModelAllocator:
    """The same contract, in dicts and sets."""

    def __init__(self, num_pages):
        self.stack = list(range(num_pages - 1, 0, -1))
        self.references = Counter()
        self.frees = Counter()
        self.dirty = set()
        self.cached = set()
        self.idle = []  # held by the cache alone, oldest first

    def allocate(self, count):
        if count > len(self.stack):
            raise OutOfPagesError(count, len(self.stack))
        pages = [self.stack.pop() for _ in range(count)]
        self.references.update(pages)
        return pages

    def share(self, pages):
        if any(not self.references[page] for page in pages):
            raise PageNotAllocatedError("")
        self.references.update(set(pages))
        self.idle = [page for page in self.idle if page not in pages]

    def release(self, pages):
        unheld = [page for page in pages if self.references[page] == (page in self.cached)]
        if any(page in self.cached or self.frees[page] for page in unheld):
            raise DoubleFreeError("")
        if unheld:
            raise PageNotAllocatedError("")
        self.references.subtract(set(pages))
        in_order = pages[::-1] if len(pages) == len(set(pages)) else sorted(set(pages))
        self.idle += [page for page in in_order if page in self.cached and self.references[page] == 1]
        return self.free_up([page for page in sorted(set(pages)) if not self.references[page]])

    def free_up(self, pages):
        for page in pages:
            self.frees[page] += 1
            self.dirty.add(page)
            self.stack.append(page)
        return pages

    def retain_cached(self, pages):
        if any(not self.references[page] for page in pages):
            raise PageNotAllocatedError("")
        if self.cached & set(pages):
            raise PageCacheError("")
        self.require_clean(pages)
        self.references.update(set(pages))
        self.cached |= set(pages)

    def release_cached(self, pages):
        if set(pages) - self.cached:
            raise PageCacheError("")
        self.references.subtract(set(pages))
        self.cached -= set(pages)
        self.idle = [page for page in self.idle if page not in pages]
        return self.free_up([page for page in sorted(set(pages)) if not self.references[page]])

    def renew_cached(self, pages):
        if set(pages) - set(self.idle):
            raise PageCacheError("")
        self.idle = [page for page in self.idle if page not in pages] + pages

    def oldest_cached(self, count):
        return self.idle[:count]

    def require_held(self, pages):
        if any(self.references[page] == (page in self.cached) for page in pages):
            raise PageNotAllocatedError("")

    def confirm_scrubbed(self, pages):
        if any(not self.references[page] for page in pages):
            raise PageNotAllocatedError("")
        self.dirty -= set(pages)

    def require_clean(self, pages):
        if self.dirty & set(pages):
            raise DirtyPageError("")


NUM_PAGES = 12
CALLS = ["share", "release", "confirm_scrubbed", "require_clean", "retain_cached", "release_cached", "require_held"]
some_pages = st.lists(st.integers(1, NUM_PAGES - 1), max_size=6)


class AllocatorMachine(RuleBasedStateMachine):
    """Every call gives what the model gives: the same result, or the same named error and no change."""

    def __init__(self):
        super().__init__()
        self.fast = PageAllocator(NUM_PAGES)
        self.naive = ModelAllocator(NUM_PAGES)

    def both(self, name, argument):
        outcomes = []
        for allocator in (self.naive, self.fast):
            try:
                result = getattr(allocator, name)(argument)
                outcomes.append(None if result is None else list(map(int, result)))
            except (OutOfPagesError, DoubleFreeError, PageNotAllocatedError, DirtyPageError, PageCacheError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count):
        self.both("allocate", count)

    @rule(pages=some_pages, name=st.sampled_from(CALLS))
    def on_any_pages(self, pages, name):
        self.both(name, pages)

    @rule(data=st.data(), name=st.sampled_from(CALLS))
    def on_live_pages(self, data, name):
        live = sorted(self.naive.references.keys() - {p for p, n in self.naive.references.items() if not n})
        if live:
            self.both(name, data.draw(st.lists(st.sampled_from(live), max_size=5)))

    @rule()
    def fill_and_cache_everything(self):
        """Sooner than the rules above would come by it: pages that can be let go of to the cache."""
        held = [page for page, count in self.naive.references.items() if count > (page in self.naive.cached)]
        self.both("confirm_scrubbed", held)
        self.both("retain_cached", [page for page in held if page not in self.naive.cached])

    @rule(data=st.data())
    def on_cached_pages(self, data):
        if self.naive.cached:
            pages = data.draw(st.lists(st.sampled_from(sorted(self.naive.cached)), max_size=5, unique=True))
            self.both(data.draw(st.sampled_from(["release", "release_cached", "renew_cached"])), pages)

    @rule(count=st.integers(0, NUM_PAGES))
    def oldest_cached(self, count):
        self.both("oldest_cached", count)

    @invariant()
    def the_books_agree(self):
        fast, naive = self.fast, self.naive
        pages = range(NUM_PAGES)
        assert fast.reference_count.tolist() == [naive.references[page] for page in pages]
        assert fast.epoch.tolist() == [naive.frees[page] for page in pages]
        assert set(np.flatnonzero(fast.dirty).tolist()) == naive.dirty
        assert fast.free_pages == len(naive.stack)
        assert set(np.flatnonzero(fast.cached).tolist()) == naive.cached
        assert fast.oldest_cached(NUM_PAGES).tolist() == naive.idle
        assert fast.cached_pages == len(naive.idle)
        assert fast.free_pages + fast.live_pages + fast.cached_pages == NUM_PAGES - 1
        fast.check_invariants([naive.references[page] - (page in naive.cached) for page in pages])


TestAllocatorAgainstItsModel = AllocatorMachine.TestCase
TestAllocatorAgainstItsModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def books(allocator):
    """Everything that an error must leave alone."""
    return (
        allocator.free_pages,
        allocator._free_stack.tolist(),
        allocator.reference_count.tolist(),
        allocator.epoch.tolist(),
        allocator.dirty.tolist(),
        allocator.cached.tolist(),
        allocator.oldest_cached(allocator.num_pages).tolist(),
    )


def test_the_padding_page_is_never_dealt():
    allocator = PageAllocator(9)
    assert sorted(allocator.allocate(8).tolist()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert allocator.free_pages == 0


def test_a_pool_of_one_page_is_refused():
    with pytest.raises(PageIdError, match="num_pages is 1"):
        PageAllocator(1)


def test_fresh_pages_are_clean():
    allocator = PageAllocator(5)
    allocator.require_clean(allocator.allocate(4))


def test_too_large_a_request_gets_nothing_and_says_both_numbers():
    allocator = PageAllocator(5)
    allocator.allocate(1)
    before = books(allocator)
    with pytest.raises(OutOfPagesError, match="4 pages requested, 3 free") as caught:
        allocator.allocate(4)
    assert (caught.value.requested, caught.value.free) == (4, 3)
    assert books(allocator) == before


def test_the_dealt_pages_are_the_callers_own_array():
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    kept = pages.copy()
    allocator.release(pages)
    pages[:] = 0
    assert sorted(allocator.allocate(2).tolist()) == sorted(kept.tolist())


def test_a_page_is_dirty_from_its_freeing_until_it_is_confirmed():
    allocator = PageAllocator(3)
    page = allocator.allocate(1)
    allocator.release(page)
    assert allocator.dirty[page].all()
    again = allocator.allocate(1)
    assert again == page
    with pytest.raises(DirtyPageError, match=f"page {page[0]} dirty"):
        allocator.require_clean(again)
    allocator.confirm_scrubbed(again)
    allocator.require_clean(again)


def test_a_shared_page_survives_its_first_release_clean():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.share(pages)
    assert allocator.release(pages).size == 0
    allocator.require_clean(pages)
    assert allocator.release(pages).tolist() == sorted(pages.tolist())
    assert allocator.epoch[pages].tolist() == [1, 1]


def test_a_page_named_twice_in_one_call_counts_once():
    allocator = PageAllocator(4)
    page = int(allocator.allocate(1)[0])
    allocator.share([page, page])
    assert allocator.reference_count[page] == 2
    assert allocator.release([page, page]).size == 0
    assert allocator.release([page, page, page]).tolist() == [page]
    assert allocator.free_pages == 3


def test_a_double_free_is_named():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(DoubleFreeError, match="pages 1, 2 already free"):
        allocator.release(pages)


def test_a_free_of_a_page_never_allocated_is_named():
    with pytest.raises(PageNotAllocatedError, match="page 3, never allocated"):
        PageAllocator(5).release([3])


@pytest.mark.parametrize("verb", ["share", "confirm_scrubbed"])
def test_only_an_allocated_page_can_be_shared_or_confirmed(verb):
    allocator = PageAllocator(5)
    allocator.release(allocator.allocate(1))
    with pytest.raises(PageNotAllocatedError, match="page 1, free"):
        getattr(allocator, verb)([1])
    assert allocator.dirty[1]


@pytest.mark.parametrize("verb", [*CALLS, "renew_cached"])
@pytest.mark.parametrize("bad", [[0], [-1], [5], [1, 99], [1.0], [True]])
def test_an_impossible_page_id_is_named_and_changes_nothing(verb, bad):
    allocator = PageAllocator(5)
    allocator.allocate(2)
    before = books(allocator)
    with pytest.raises(PageIdError):
        getattr(allocator, verb)(bad)
    assert books(allocator) == before


def test_a_negative_count_is_refused():
    with pytest.raises(PageIdError, match="-1 pages requested"):
        PageAllocator(5).allocate(-1)


@pytest.mark.parametrize("verb", ["share", "release", "confirm_scrubbed", "retain_cached"])
def test_one_bad_page_among_good_ones_changes_nothing(verb):
    allocator = PageAllocator(8)
    allocator.release(allocator.allocate(4))
    held = allocator.allocate(3)
    before = books(allocator)
    with pytest.raises((PageNotAllocatedError, DoubleFreeError)):
        getattr(allocator, verb)([*held.tolist(), 7])
    assert books(allocator) == before


def test_no_pages_is_no_error():
    allocator = PageAllocator(3)
    assert allocator.allocate(0).dtype == np.int32
    allocator.share([])
    allocator.confirm_scrubbed([])
    allocator.require_clean([])
    assert allocator.release([]).dtype == np.int32


def test_a_long_list_of_offenders_is_cut_short():
    allocator = PageAllocator(100)
    pages = allocator.allocate(99)
    allocator.release(pages)
    with pytest.raises(DoubleFreeError, match="pages 1, 2, 3, 4 and 95 more") as caught:
        allocator.release(pages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["reference_count", "epoch", "dirty", "cached"])
def test_the_books_cannot_be_written_from_outside(name):
    with pytest.raises(ValueError, match="read-only"):
        getattr(PageAllocator(3), name)[1] = 1


def test_a_cached_page_outlives_its_request_and_is_not_live():
    allocator = PageAllocator(4)
    page = allocator.allocate(1)
    allocator.retain_cached(page)
    assert (allocator.live_pages, allocator.cached_pages) == (1, 0)
    assert allocator.release(page).size == 0
    assert (allocator.free_pages, allocator.live_pages, allocator.cached_pages) == (2, 0, 1)
    allocator.require_clean(page)
    allocator.share(page)
    assert (allocator.live_pages, allocator.cached_pages) == (1, 0)


def test_a_request_cannot_release_the_hold_of_the_cache():
    allocator = PageAllocator(4)
    page = allocator.allocate(1)
    allocator.retain_cached(page)
    allocator.release(page)
    before = books(allocator)
    with pytest.raises(DoubleFreeError, match="page 1 held by the cache alone"):
        allocator.release(page)
    assert books(allocator) == before
    assert allocator.release_cached(page).tolist() == page.tolist()
    assert allocator.free_pages == 3
    assert allocator.dirty[page].all()


def test_the_cache_lets_go_of_a_live_page_without_taking_it_from_its_request():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.retain_cached(pages)
    allocator.release(pages[:1])
    assert allocator.release_cached(pages).tolist() == pages[:1].tolist()
    assert allocator.live_pages == 1
    assert allocator.release(pages[1:]).tolist() == pages[1:].tolist()


def test_a_dirty_page_is_not_cached():
    allocator = PageAllocator(4)
    allocator.release(allocator.allocate(1))
    page = allocator.allocate(1)
    before = books(allocator)
    with pytest.raises(DirtyPageError, match="page 1 dirty"):
        allocator.retain_cached(page)
    assert books(allocator) == before


def test_a_page_is_cached_once_and_uncached_once():
    allocator = PageAllocator(4)
    page = allocator.allocate(1)
    allocator.retain_cached(page)
    with pytest.raises(PageCacheError, match="page 1 cached already"):
        allocator.retain_cached(page)
    allocator.release_cached(page)
    with pytest.raises(PageCacheError, match="page 1 not cached"):
        allocator.release_cached(page)


def test_the_pages_of_a_request_grow_old_from_the_last_to_the_first():
    allocator = PageAllocator(9)
    first, second = allocator.allocate(3)[::-1], allocator.allocate(3)
    for pages in (first, second):
        allocator.retain_cached(pages)
    allocator.release(second)
    allocator.release(first)
    assert allocator.oldest_cached(9).tolist() == [*second[::-1].tolist(), *first[::-1].tolist()]


class TestInvariants:
    @pytest.fixture
    def allocator(self):
        allocator = PageAllocator(6)
        allocator.allocate(3)
        return allocator

    holders = (0, 1, 1, 1, 0, 0)

    def test_sound_books_pass(self, allocator):
        allocator.check_invariants(self.holders)

    def test_a_lost_holder_is_a_leak(self, allocator):
        with pytest.raises(InvariantError, match="page 2 referenced otherwise than held"):
            allocator.check_invariants((0, 1, 0, 1, 0, 0))

    def test_a_mapped_free_page_is_found(self, allocator):
        with pytest.raises(InvariantError, match="page 5 free and mapped"):
            allocator.check_invariants((0, 1, 1, 1, 0, 1))

    def test_a_page_twice_on_the_free_stack_is_found(self, allocator):
        allocator._free_stack[0] = allocator._free_stack[1]
        with pytest.raises(InvariantError, match="page 4 more than once on the free stack"):
            allocator.check_invariants(self.holders)

    def test_a_page_that_fell_off_the_free_stack_is_found(self, allocator):
        allocator._free -= 1
        with pytest.raises(InvariantError, match="1 free \\+ 3 live \\+ 0 cached is not 5 usable"):
            allocator.check_invariants(self.holders)

    def test_a_page_both_free_and_referenced_is_found(self, allocator):
        allocator._references[5] = 1
        with pytest.raises(InvariantError, match="page 5 both free and referenced"):
            allocator.check_invariants(self.holders)

    def test_a_dealt_padding_page_is_found(self, allocator):
        allocator._free_stack[0] = 0
        with pytest.raises(InvariantError, match="page 0 is dealt"):
            allocator.check_invariants(self.holders)

    def test_a_cached_page_that_nobody_queued_is_found(self, allocator):
        allocator.retain_cached([2])
        allocator.check_invariants(self.holders)
        allocator._references[2] -= 1
        with pytest.raises(InvariantError, match="page 2 cached alone and not queued"):
            allocator.check_invariants((0, 1, 0, 1, 0, 0))

    def test_a_cached_page_without_a_reference_is_found(self, allocator):
        allocator._cached[5] = True
        with pytest.raises(InvariantError, match="page 5 cached and without a reference"):
            allocator.check_invariants(self.holders)

    def test_holders_of_another_pool_are_refused(self, allocator):
        with pytest.raises(InvariantError, match="shape \\(5,\\)"):
            allocator.check_invariants(self.holders[1:])
