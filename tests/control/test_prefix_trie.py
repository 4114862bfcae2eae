"""The prefix trie against a dict of token tuples, with requests that write, share and let go of pages; and its faults.

Every page has a content here, as it would on the device: whose tokens its K/V was computed from. A hit on a page with
any other content is a wrong answer, whatever the bookkeeping says.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_common import CacheNamespace
from kv_control import prefix_trie
from kv_control.page_allocator import DirtyPageError, PageAllocator, PageCacheError, PageNotAllocatedError
from kv_control.prefix_nodes import PrefixNodesError
from kv_control.prefix_trie import PrefixTrie, PrefixTrieError, StaleMatchError, page_digest
from kv_control.prefix_values import NOWHERE, MissReason, root_place

NS = b"n" * 32
PAGE = 4


def constant(data):
    return b"same for everything."


def weak(data):
    return bytes([sum(data) % 3])


@dataclasses.dataclass
class Request:
    """A running request: `pages` in the order of its tokens, and where in the trie they are."""

    namespace: bytes
    tokens: np.ndarray
    pages: np.ndarray
    place: tuple
    match: tuple

    @property
    def full_pages(self):
        return len(self.tokens) // PAGE


class World:
    """A pool with a trie, requests over them, and the content of every page."""

    def __init__(self, usable_pages=63, digest=page_digest):
        self.allocator = PageAllocator(usable_pages + 1)
        self.trie = PrefixTrie(self.allocator, PAGE, digest=digest)
        self.content = {}
        self.requests = []
        self.told = set()

    def books(self):
        """What a refusal must leave alone."""
        statistics = self.trie.statistics
        allocator = self.allocator
        return (
            allocator.reference_count.tolist(),
            allocator.epoch.tolist(),
            allocator.cached.tolist(),
            allocator.oldest_cached(allocator.num_pages).tolist(),
            allocator.free_pages,
            statistics,
        )

    def match(self, tokens, namespace=NS, **options):
        """A match, each page of which has the right content."""
        match = self.trie.match(namespace, tokens, **options)
        sources = [(page, (at + 1) * PAGE) for at, page in enumerate(match.pages.tolist())]
        if match.fork:
            sources.append((match.fork.source_page, match.cached_tokens))
        for page, known in sources:
            owner, content = self.content[page]
            assert owner == namespace
            assert content[:known] == tuple(tokens)[:known]
            assert known > len(content) - PAGE
        assert match.cached_tokens < len(tokens)
        return match

    def start(self, tokens, namespace=NS, **options):
        """Admit a request as a scheduler would: None where it does not fit, and then nothing has changed."""
        tokens = np.array(tokens, np.int32)
        before = self.books()
        match = self.match(tokens, namespace, **options)
        needed = -(-len(tokens) // PAGE) - match.pages.size
        if needed > self.allocator.free_pages + self.trie.evictable_pages_beside(match):
            assert self.books() == before
            return None
        self.trie.hold(match)
        self.evict(needed - self.allocator.free_pages)
        new = self.allocator.allocate(needed)
        self.allocator.confirm_scrubbed(new)
        pages = np.concatenate([match.pages, new])
        for at, page in enumerate(pages.tolist()):
            if at >= match.pages.size:
                self.content[page] = (namespace, tuple(tokens[: (at + 1) * PAGE].tolist()))
        if match.fork:
            self.allocator.release([match.fork.source_page])
        self.requests.append(Request(namespace, tokens, pages, match.place, match))
        return self.requests[-1]

    def publish(self, request, most=None):
        """Publish the next full pages of a request."""
        start = request.place.pages
        stop = request.full_pages if most is None else min(request.full_pages, start + most)
        own = request.pages[start:stop]
        published = self.trie.publish(request.place, request.tokens[start * PAGE : stop * PAGE], own)
        assert published.duplicates == np.count_nonzero(published.pages != own)
        for old, new in zip(own.tolist(), published.pages.tolist(), strict=True):
            assert self.content[old] == self.content[new]
        request.pages[start:stop] = published.pages
        request.place = published.place
        return published

    def end(self, request):
        self.allocator.release(request.pages)
        self.requests = [one for one in self.requests if one is not request]

    def cache(self, tokens, namespace=NS):
        """Run a request to its end and return its pages."""
        request = self.start(tokens, namespace)
        self.publish(request)
        self.end(request)
        return request.pages.tolist()

    def evict(self, wanted):
        held = Counter(page for request in self.requests for page in request.pages.tolist())
        freed = self.trie.evict(wanted)
        assert not [page for page in freed.tolist() if held[page]]
        return freed

    def check(self):
        holders = np.zeros(self.allocator.num_pages, np.int64)
        for request in self.requests:
            holders[request.pages] += 1
        self.allocator.check_invariants(holders)
        self.trie.check_invariants()
        allocator = self.allocator
        assert allocator.free_pages + allocator.live_pages + allocator.cached_pages == allocator.num_pages - 1
        assert self.trie.evictable_pages == np.count_nonzero(allocator.cached & (holders == 0))
        assert self.trie.statistics.cached_pages == np.count_nonzero(allocator.cached)
        self.follow()

    def follow(self):
        """Whoever follows the changes has the keys of the cached pages."""
        changes = self.trie.take_changes()
        stored, removed = set(changes.stored), set(changes.removed)
        assert not stored & self.told
        assert removed <= self.told
        self.told = self.told - removed | stored
        nodes = self.trie._nodes
        assert self.told == {nodes.key_of(page) for page in np.flatnonzero(self.allocator.cached).tolist()}


NAMESPACES = (b"a" * 32, b"b" * 32)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4 * PAGE + 1)


class TrieMachine(RuleBasedStateMachine):
    """Requests come, publish page by page, end, and others take their place in a pool that is too small."""

    digest = staticmethod(page_digest)

    def __init__(self):
        super().__init__()
        self.world = World(usable_pages=9, digest=self.digest)
        self.cached = {}  # (namespace, tokens of the path) -> page

    def expected_pages(self, namespace, tokens):
        pages = []
        for end in range(PAGE, len(tokens), PAGE):
            page = self.cached.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def expected_fork(self, namespace, tokens, whole):
        rest = tokens[whole * PAGE :]
        below = [
            path[-PAGE:]
            for owner, path in self.cached
            if owner == namespace and len(path) == (whole + 1) * PAGE and path[: whole * PAGE] == tokens[: whole * PAGE]
        ]
        longest = min(len(rest), PAGE) - 1
        return max((shared_length(path[:longest], rest) for path in below), default=0)

    def compare(self, namespace, tokens, match):
        pages = self.expected_pages(namespace, tokens)
        assert match.pages.tolist() == pages
        assert match.cached_tokens == len(pages) * PAGE + self.expected_fork(namespace, tuple(tokens), len(pages))

    def forget(self, pages):
        self.cached = {path: page for path, page in self.cached.items() if page not in pages}

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts)
    def start(self, namespace, tokens):
        cached = self.world.allocator.cached.copy()
        self.compare(namespace, tokens, self.world.match(tokens, namespace))
        self.world.start(tokens, namespace)
        self.forget(np.flatnonzero(cached & ~self.world.allocator.cached))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), most=st.sampled_from([1, 2, None]))
    def publish(self, data, most):
        request = data.draw(st.sampled_from(self.world.requests))
        if request.place == NOWHERE:
            return
        start = request.place.pages
        published = self.world.publish(request, most)
        if published.place == NOWHERE:
            return
        for at in range(start, published.place.pages):
            path = (request.namespace, tuple(request.tokens[: (at + 1) * PAGE].tolist()))
            assert self.cached.setdefault(path, int(request.pages[at])) == request.pages[at]

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def end(self, data):
        self.world.end(data.draw(st.sampled_from(self.world.requests)))

    @rule(wanted=st.integers(0, 10))
    def evict(self, wanted):
        evictable = self.world.trie.evictable_pages
        freed = self.world.evict(wanted)
        assert freed.size == min(wanted, evictable)
        self.forget(freed.tolist())
        for namespace, path in self.cached:
            assert len(path) == PAGE or (namespace, path[:-PAGE]) in self.cached, "a parent left before its child"

    @rule()
    def reset(self):
        self.world.trie.reset()
        self.cached = {}
        if not self.world.requests:
            assert self.world.allocator.free_pages == self.world.allocator.num_pages - 1

    @invariant()
    def the_books_agree(self):
        self.world.check()
        assert self.world.trie.statistics.cached_pages >= len(self.cached)


class CollidingMachine(TrieMachine):
    """With a hash that collides all the time, the first come is what is hit; `World` checks that it is right."""

    digest = staticmethod(weak)

    def compare(self, namespace, tokens, match):
        pass


class ConstantMachine(CollidingMachine):
    digest = staticmethod(constant)


TestTrieAgainstItsModel = TrieMachine.TestCase
TestTrieAgainstItsModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTrieWithAWeakHash = CollidingMachine.TestCase
TestTrieWithAWeakHash.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestTrieWithAConstantHash = ConstantMachine.TestCase
TestTrieWithAConstantHash.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def shared_length(left, right):
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


def tokens(*pages):
    """Tokens of pages that are told apart by one number each."""
    return [10 * page + at for page in pages for at in range(PAGE)]


@pytest.fixture
def world():
    world = World()
    yield world
    world.check()


class TestMatching:
    def test_a_published_prefix_is_hit_with_its_own_pages(self, world):
        pages = world.cache(tokens(1, 2, 3))
        match = world.match([*tokens(1, 2), 99])
        assert match.pages.tolist() == pages[:2]
        assert (match.place.page, match.place.pages, match.cached_tokens) == (pages[1], 2, 8)

    def test_pages_are_published_as_they_fill(self, world):
        request = world.start(tokens(1, 2, 3))
        for filled in range(1, 4):
            world.publish(request, most=1)
            assert world.match([*tokens(1, 2, 3), 99]).pages.size == filled

    @pytest.mark.parametrize("length", range(1, 4 * PAGE + 2))
    def test_at_least_one_token_is_computed_and_at_most_a_page_of_what_is_cached(self, world, length):
        prompt = tokens(1, 2, 3, 4)
        world.cache(prompt)
        match = world.match([*prompt, 99][:length])
        assert match.cached_tokens == min(length - 1, 4 * PAGE)

    def test_a_wholly_cached_prompt_forks_its_last_page_for_one_token(self, world):
        pages = world.cache(tokens(1, 2))
        match = world.match(tokens(1, 2))
        assert match.pages.tolist() == pages[:1]
        assert match.fork == (pages[1], PAGE - 1)
        assert match.miss_reason is MissReason.LAST_TOKEN

    def test_the_fork_is_the_child_that_shares_most(self, world):
        for last in ([1, 2, 7, 7], [1, 2, 3, 7], [1, 7, 7, 7]):
            world.cache([*tokens(1), *last])
        match = world.match([*tokens(1), 1, 2, 3, 4, 5])
        assert match.fork.tokens == 3
        assert world.content[match.fork.source_page][1][-PAGE:] == (1, 2, 3, 7)

    def test_a_fork_leaves_a_token_even_when_the_rest_is_short(self, world):
        world.cache([1, 2, 3, 4])
        assert world.match([1, 2]).fork.tokens == 1
        assert world.match([1]).fork is None

    def test_pages_of_one_token_need_no_forks(self):
        allocator = PageAllocator(4)
        trie = PrefixTrie(allocator, 1)
        trie.publish(root_place(NS), [5, 6], allocator.allocate(2))
        match = trie.match(NS, [5, 6])
        assert (match.cached_tokens, match.fork, match.miss_reason) == (1, None, MissReason.LAST_TOKEN)

    def test_only_the_newest_children_are_looked_at(self, world, monkeypatch):
        monkeypatch.setattr(prefix_trie, "FORK_CANDIDATES", 2)
        for last in ([1, 2, 3, 7], [8, 0, 0, 0], [9, 0, 0, 0]):
            world.cache([*tokens(1), *last])
        assert world.match([*tokens(1), 1, 2, 3, 4]).fork is None
        assert world.match([*tokens(1), 8, 0, 3, 4]).fork.tokens == 2

    def test_an_edited_token_invalidates_everything_behind_it(self, world):
        history = tokens(1, 2, 3, 4)
        pages = world.cache(history)
        edited = [*history[:PAGE], 777, *history[PAGE + 1 :], 99]
        match = world.match(edited)
        assert match.pages.tolist() == pages[:1]
        assert match.fork is None
        world.cache(edited)
        assert world.match([*edited, 5]).cached_tokens == 4 * PAGE
        assert world.match([*history, 5]).pages.tolist() == pages

    def test_tokens_that_only_meet_at_other_page_boundaries_do_not_match(self, world):
        world.cache(tokens(1, 2))
        assert world.match([*tokens(2), 99]).pages.size == 0
        assert world.match([0, *tokens(1, 2)]).pages.size == 0

    def test_a_request_may_decline_to_read_and_still_publish(self, world):
        pages = world.cache(tokens(1, 2))
        request = world.start([*tokens(1, 2), 99], read_cache=False)
        assert (request.match.cached_tokens, request.match.fork) == (0, None)
        assert request.match.miss_reason is MissReason.UNCACHEABLE
        assert world.publish(request).duplicates == 2
        assert request.pages.tolist()[:2] == pages

    def test_keys_of_an_earlier_match_give_the_same_match(self, world):
        world.cache(tokens(1, 2))
        prompt = [*tokens(1, 2, 3), 99]
        match = world.match(prompt)
        again = world.trie.match(NS, prompt, keys=match.keys)
        assert (again.pages.tolist(), again.place, again.missing_key) == (
            match.pages.tolist(),
            match.place,
            match.keys[2],
        )

    def test_keys_can_be_continued_from_any_page(self, world):
        keys = world.trie.page_keys(NS, tokens(1, 2, 3))
        assert world.trie.page_keys(keys[0], tokens(2, 3)) == keys[1:]
        assert len(set(keys)) == 3

    @pytest.mark.parametrize("bad", [[], [1.5], [[1, 2]], [2**32 + 10], [-(2**31) - 1]])
    def test_token_ids_that_are_not_int32_are_refused(self, world, bad):
        with pytest.raises(PrefixTrieError):
            world.trie.match(NS, bad)

    def test_too_few_keys_are_refused(self, world):
        with pytest.raises(PrefixTrieError, match="0 keys for 4 tokens"):
            world.trie.match(NS, tokens(1), keys=[])


BASE = CacheNamespace(
    weights_fingerprint=b"w" * 32,
    revision="main",
    model_config=(("norm_eps", 1e-5),),
    rope=(("theta", 10000.0),),
    compute_dtype="float32",
    tokenizer_fingerprint=b"t" * 32,
    kv_dtype="float32",
    kv_quantization="",
    layout=(("tokens_per_page", PAGE),),
    kv_head_shards=1,
    adapter_fingerprint=b"adapter",
    prompt_embeddings=b"",
    multimodal_inputs=b"",
)


def something_else(value):
    """The least change of a value: one letter, one bit, one more."""
    if isinstance(value, tuple):
        return (*value, ("one more", 1))
    if isinstance(value, int):
        return value + 1
    return value + (b"x" if isinstance(value, bytes) else "x")


class TestNamespaces:
    @pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CacheNamespace)])
    @pytest.mark.parametrize("digest", [page_digest, constant])
    def test_changing_any_one_field_alone_defeats_the_match(self, name, digest):
        world = World(digest=digest)
        world.cache(tokens(1), BASE.digest())
        other = dataclasses.replace(BASE, **{name: something_else(getattr(BASE, name))})
        match = world.match([*tokens(1), 99], other.digest())
        assert match.cached_tokens == 0
        assert match.miss_reason is MissReason.NAMESPACE
        assert world.match([*tokens(1), 99], BASE.digest()).cached_tokens == PAGE

    @pytest.mark.parametrize("pairs", [(("tenant", "ab"), ("revision", "c")), (("tenant", "a"), ("revision", "bc"))])
    def test_a_letter_moved_across_a_boundary_is_another_namespace(self, world, pairs):
        both = {(("tenant", "ab"), ("revision", "c")), (("tenant", "a"), ("revision", "bc"))}
        (other,) = both - {pairs}
        world.cache(tokens(1), dataclasses.replace(BASE, **dict(pairs)).digest())
        assert world.match([*tokens(1), 99], dataclasses.replace(BASE, **dict(other)).digest()).cached_tokens == 0

    def test_a_namespace_that_ends_like_a_page_begins_is_another(self, world):
        # The bytes that are hashed for the first page are the same; what differs is where the namespace ends.
        prompt = np.array(tokens(1), np.int32)
        longer = NS + prompt.tobytes()
        keys = world.trie.page_keys(NS, tokens(1, 2))
        assert world.trie.page_keys(longer, tokens(2)) != keys[1:]
        world.cache(tokens(1, 2))
        assert world.match([*tokens(2), 99], longer).cached_tokens == 0
        # And a key passed off as a namespace finds the key, but not the root.
        assert world.match([*tokens(2), 99], keys[0]).cached_tokens == 0

    def test_namespaces_that_hold_nothing_cost_nothing(self, world):
        for tenant in range(200):
            world.cache(tokens(1), b"tenant %d" % tenant)
        world.trie.evict(63)
        assert world.trie._nodes._root_of == {}
        assert world.trie._nodes._first_pages == {}


class TestCollisions:
    @pytest.mark.parametrize("digest", [constant, weak])
    @given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3 * PAGE + 1), max_size=6))
    @settings(max_examples=40, deadline=None)
    def test_a_colliding_hash_costs_hits_and_nothing_else(self, digest, prompts):
        world = World(digest=digest)
        for prompt in prompts:
            world.cache(prompt)
            world.check()
            world.match([*prompt, 9])

    def test_a_page_whose_key_is_taken_stays_with_its_request(self):
        world = World(digest=constant)
        world.cache(tokens(1))
        request = world.start(tokens(2, 3))
        own = request.pages.tolist()
        published = world.publish(request)
        assert (published.place, published.pages.tolist(), published.duplicates) == (NOWHERE, own, 0)
        world.end(request)
        assert world.allocator.live_pages == 0
        assert world.match([*tokens(1), 99]).cached_tokens == PAGE
        assert world.match([*tokens(2), 99]).cached_tokens == 0

    def test_a_chain_of_equal_keys_is_published_up_to_the_first_repeat(self):
        world = World(digest=constant)
        request = world.start(tokens(1, 1, 1))
        published = world.publish(request)
        assert (published.place, world.trie.statistics.published) == (NOWHERE, 1)
        assert world.match(tokens(1, 1, 1)).pages.size == 1


class TestPublishing:
    def test_a_duplicate_is_swapped_for_the_cached_page_and_given_back(self, world):
        first, second = world.start(tokens(1, 2)), world.start(tokens(1, 2))
        own = second.pages.copy()
        world.publish(first)
        published = world.publish(second)
        assert published.duplicates == 2
        assert second.pages.tolist() == first.pages.tolist()
        assert world.allocator.reference_count[first.pages].tolist() == [3, 3]
        assert world.allocator.reference_count[own].tolist() == [0, 0]
        assert world.trie.statistics.duplicates == 2

    def test_publishing_again_changes_nothing(self, world):
        request = world.start(tokens(1, 2))
        world.publish(request)
        before = world.books()
        again = world.trie.publish(root_place(NS), tokens(1, 2), request.pages)
        assert (again.place, again.duplicates) == (request.place, 0)
        assert world.books() == before

    def test_requests_that_part_ways_share_what_they_have_in_common(self, world):
        first, second = world.start(tokens(1, 2)), world.start(tokens(1, 3))
        for request in (first, second):
            world.publish(request)
        assert first.pages[0] == second.pages[0]
        assert first.pages[1] != second.pages[1]
        assert world.trie.statistics.published == 3

    @pytest.mark.parametrize(
        ("pages", "error"),
        [([1, 1], PrefixTrieError), ([1], PrefixTrieError), ([1, 9], PageNotAllocatedError), ([1, 4], PageCacheError)],
    )
    def test_a_refusal_changes_nothing(self, world, pages, error):
        world.requests.append(Request(NS, np.zeros(0), world.allocator.allocate(3), root_place(NS), ()))
        other = world.start(tokens(7))
        assert other.pages.tolist() == [4]
        world.publish(other)
        before = world.books()
        with pytest.raises(error):
            world.trie.publish(root_place(NS), tokens(1, 2), pages)
        assert world.books() == before

    def test_a_page_that_was_not_scrubbed_is_not_published(self, world):
        world.allocator.release(world.allocator.allocate(3))
        pages = world.allocator.allocate(1)
        with pytest.raises(DirtyPageError):
            world.trie.publish(root_place(NS), tokens(1), pages)
        world.allocator.release(pages)

    def test_a_duplicate_that_the_caller_does_not_hold_is_refused(self, world):
        pages = world.cache(tokens(1))
        before = world.books()
        for page in (pages[0], 9):
            with pytest.raises(PageNotAllocatedError):
                world.trie.publish(root_place(NS), tokens(1), [page])
        assert world.books() == before

    def test_nothing_is_published_below_a_page_that_has_gone_to_another_prefix(self):
        world = World(usable_pages=2)
        request = world.start(tokens(1, 2))
        old = world.publish(request, most=1).place
        world.end(request)
        world.evict(1)
        others = [world.start(tokens(5)), world.start(tokens(6))]
        world.publish(others[0])
        world.publish(others[1])
        assert old.page in [other.place.page for other in others]
        before = world.books()
        assert world.trie.publish(old, tokens(2), others[0].pages).place == NOWHERE
        assert world.books() == before

    def test_nothing_to_publish_is_no_error(self, world):
        place = root_place(NS)
        assert world.trie.publish(place, [], []).place == place

    def test_pages_published_by_a_request_that_is_then_taken_back_are_not_reused_under_the_cache(self, world):
        """Chunks are published, the request is preempted, and its freed pages are written by others."""
        request = world.start([*tokens(1, 2, 3), 5])
        world.publish(request, most=2)
        published = request.pages[:2].tolist()
        world.end(request)
        others = [world.start([900 + at] * PAGE) for at in range(61)]
        assert not set(published) & {page for other in others for page in other.pages.tolist()}
        assert world.match([*tokens(1, 2), 99]).pages.tolist() == published


class TestHolding:
    def test_a_failed_admission_leaves_every_count_as_it_was(self):
        """The pool is full of the very pages that the request hits: they cannot be hit and evicted both."""
        world = World(usable_pages=4)
        world.cache(tokens(1, 2, 3, 4))
        assert world.trie.evictable_pages == 4
        match = world.match(tokens(1, 2, 3, 4, 5))
        assert world.trie.evictable_pages_beside(match) == 0
        assert world.start(tokens(1, 2, 3, 4, 5)) is None  # compares the books
        assert world.start([*tokens(1, 2, 3), 99]) is not None

    def test_the_source_of_a_fork_cannot_be_evicted_before_it_is_copied(self, world):
        pages = world.cache(tokens(1, 2))
        match = world.match(tokens(1, 2))
        assert world.trie.evictable_pages_beside(match) == 0
        world.trie.hold(match)
        assert world.trie.evict(9).size == 0
        world.allocator.release([match.fork.source_page])
        assert world.trie.evict(9).tolist() == pages[1:]
        world.allocator.release(match.pages)

    def test_a_match_from_before_an_eviction_is_not_held(self, world):
        world.cache(tokens(1, 2))
        match = world.match([*tokens(1, 2), 99])
        world.evict(1)
        before = world.books()
        with pytest.raises(StaleMatchError, match="match again"):
            world.trie.hold(match)
        assert world.books() == before

    def test_hits_and_the_reasons_of_misses_are_reported(self, world):
        world.cache(tokens(1, 2))
        world.start(tokens(1, 2))
        world.start([*tokens(1, 2), 5])
        world.start(tokens(3))
        statistics = world.trie.statistics
        assert (statistics.lookups, statistics.asked_tokens, statistics.hit_tokens) == (4, 29, 7 + 8)
        assert {reason: count for reason, count in statistics.misses.items() if count} == {
            MissReason.NO_SUCH_PREFIX: 2,
            MissReason.LAST_TOKEN: 1,
            MissReason.NONE: 1,
        }

    def test_a_miss_after_an_eviction_says_so_until_it_is_forgotten(self, monkeypatch):
        monkeypatch.setattr(prefix_trie, "EVICTED_KEYS_REMEMBERED", 2)
        world = World()
        world.cache(tokens(1, 2))
        world.evict(1)
        assert world.match(tokens(1, 2)).miss_reason is MissReason.EVICTED
        assert world.match(tokens(1, 3)).miss_reason is MissReason.NO_SUCH_PREFIX
        for page in (5, 6, 7):
            world.cache(tokens(page))
        world.evict(4)
        assert world.match(tokens(7)).miss_reason is MissReason.EVICTED
        assert world.match(tokens(1, 2)).miss_reason is MissReason.NO_SUCH_PREFIX


class TestEviction:
    def test_the_longest_unused_leaf_goes_first(self, world):
        first, second = world.cache(tokens(1, 2)), world.cache(tokens(1, 3))
        world.cache([*tokens(1, 2), 9])  # used again, so the second is the older one
        assert [world.evict(1).tolist() for _ in range(3)] == [[second[1]], [first[1]], [first[0]]]

    def test_a_match_that_is_not_held_does_not_count_as_use(self, world):
        first, second = world.cache(tokens(1)), world.cache(tokens(2))
        world.match([*tokens(1), 9])
        assert world.evict(2).tolist() == [*first, *second]

    def test_pages_that_a_request_holds_are_passed_over_and_come_back_with_its_end(self, world):
        pages = world.cache(tokens(1, 2, 3))
        request = world.start([*tokens(1, 2), 99])
        assert world.evict(99).tolist() == pages[2:]
        assert world.trie.evictable_pages == 0
        world.end(request)
        assert world.evict(99).tolist() == pages[1::-1]

    def test_freed_pages_are_dirty(self, world):
        pages = world.cache(tokens(1))
        world.evict(1)
        assert world.allocator.dirty[pages].all()

    @pytest.mark.parametrize("wanted", [1, 2, 5, 99])
    def test_pages_let_go_of_parents_first_still_leave_children_first(self, world, wanted):
        request = world.start(tokens(1, 2, 3, 4, 5))
        world.publish(request)
        for page in request.pages.tolist():
            world.allocator.release([page])
        world.requests = []
        gone = []
        while world.trie.evictable_pages:
            freed = world.evict(wanted).tolist()
            assert len(freed) == min(wanted, 5 - len(gone))
            gone += freed
            world.check()
        assert len(gone) == 5

    def test_a_parent_without_holders_goes_and_its_live_child_is_cached_no_more(self, world):
        request = world.start(tokens(1, 2, 2))
        world.publish(request)
        given_back, request.pages = request.pages[:2], request.pages[2:]
        world.allocator.release(given_back)
        other = world.cache(tokens(3))
        assert world.evict(1).tolist() == other  # a leaf, so it goes first though it is younger
        world.check()
        assert world.evict(1).tolist() == given_back[1:].tolist()  # what is above it stays a prefix
        world.check()
        assert not world.allocator.cached[request.pages].any()
        assert world.trie.match(NS, tokens(1, 2, 2)).pages.tolist() == given_back[:1].tolist()
        assert world.evict(9).tolist() == given_back[:1].tolist()
        world.check()

    def test_a_chain_of_ten_thousand_pages_comes_and_goes(self):
        allocator = PageAllocator(10_001)
        trie = PrefixTrie(allocator, PAGE)
        prompt = np.arange(10_000 * PAGE, dtype=np.int32)
        pages = allocator.allocate(10_000)
        trie.publish(root_place(NS), prompt, pages)
        assert trie.match(NS, prompt).cached_tokens == prompt.size - 1
        allocator.release(pages)
        assert trie.evict(9_999).tolist() == pages[:0:-1].tolist()
        assert trie.match(NS, prompt).pages.tolist() == pages[:1].tolist()
        trie.check_invariants()


class TestChanges:
    def test_the_first_look_tells_all_and_the_next_what_is_new(self, world):
        world.cache(tokens(1, 2))
        first = world.trie.take_changes()
        assert (len(first.stored), first.removed, first.first) == (2, [], True)
        world.cache(tokens(1, 2, 3))
        world.evict(1)
        world.cache(tokens(1, 4))
        changes = world.trie.take_changes()
        keys = world.trie.page_keys(NS, tokens(1, 4))
        assert changes == (keys[1:], [], False)  # the page of 3 came and left meanwhile
        world.evict(1)
        assert world.trie.take_changes() == ([], first.stored[1:], False)
        world.trie.reset()
        assert world.trie.take_changes() == ([], keys, False)


class TestReset:
    def test_after_a_reset_without_requests_every_page_is_free(self, world):
        world.cache(tokens(1, 2, 3))
        world.trie.reset()
        assert world.allocator.free_pages == 63
        match = world.match(tokens(1, 2))
        assert (match.cached_tokens, match.miss_reason) == (0, MissReason.NO_SUCH_PREFIX)

    def test_a_running_request_keeps_its_pages_and_publishes_no_more(self, world):
        request = world.start(tokens(1, 2, 3))
        world.publish(request, most=1)
        world.trie.reset()
        assert world.allocator.live_pages == 3
        assert world.publish(request).place == NOWHERE
        assert world.match(tokens(1, 2)).cached_tokens == 0
        world.end(request)
        assert world.allocator.free_pages == 63

    def test_a_match_from_before_a_reset_is_not_held(self, world):
        world.cache(tokens(1))
        match = world.match([*tokens(1), 9])
        world.trie.reset()
        with pytest.raises(StaleMatchError):
            world.trie.hold(match)


class TestPendingPrefixes:
    def test_a_page_that_is_being_computed_is_known_by_its_owner_until_it_is_published(self, world):
        request = world.start(tokens(1, 2, 3))
        world.trie.pending.claim(request.match.keys, owner=7)
        assert world.trie.pending_owner(world.match(tokens(1, 2, 9)).missing_key) == 7
        world.publish(request, most=2)
        assert world.trie.pending_owner(request.match.keys[1]) is None
        assert world.trie.pending_owner(request.match.keys[2]) == 7
        assert world.trie.pending_owner(world.match(tokens(1, 2, 9)).missing_key) is None

    def test_the_first_claim_stands_and_ends_with_its_owner(self, world):
        keys = world.trie.page_keys(NS, tokens(1, 2))
        pending = world.trie.pending
        pending.claim(keys[:1], owner=1)
        pending.claim(keys, owner=2)
        assert [world.trie.pending_owner(key) for key in keys] == [1, 2]
        pending.end(1)
        assert [world.trie.pending_owner(key) for key in keys] == [None, 2]
        pending.end(2)
        pending.end(2)
        assert [world.trie.pending_owner(key) for key in keys] == [None, None]

    def test_a_reset_leaves_nobody_waiting_for_what_will_not_be_published(self, world):
        keys = world.trie.page_keys(NS, tokens(1))
        world.trie.pending.claim(keys, owner=1)
        world.trie.reset()
        assert world.trie.pending_owner(keys[0]) is None


class TestInvariants:
    @pytest.mark.parametrize(
        ("break_it", "fault"),
        [
            (lambda nodes: nodes._parent.__setitem__(2, 3), "parents and children"),
            (lambda nodes: nodes._child_count.__setitem__(1, 2), "child counts"),
            (lambda nodes: nodes._key.__setitem__(1, b""), "keys"),
            (lambda nodes: nodes._page_of.popitem(), "attached and cached pages"),
            (lambda nodes: nodes._first_pages.clear(), "first pages"),
            (lambda nodes: nodes._root_of.clear(), "roots"),
        ],
    )
    def test_broken_links_are_found(self, break_it, fault):
        world = World()
        world.cache(tokens(1, 2))
        break_it(world.trie._nodes)
        with pytest.raises(PrefixNodesError, match=fault):
            world.trie.check_invariants()
