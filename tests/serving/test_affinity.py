"""The affinity index: which replica has most of a prompt, and when that is no reason to go there."""

import hashlib

import pytest

from kv_serving.replicas.affinity import AffinityIndex, CachedKeys, packed


def keys(*names: str) -> list[bytes]:
    return [hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names]


def chain(*names: str) -> bytes:
    return packed(keys(*names))


@pytest.fixture
def index() -> AffinityIndex:
    index = AffinityIndex()
    index.update("a", chain("1", "2", "3", "9"))
    index.update("b", chain("1", "5"))
    index.update("empty", b"")
    return index


def test_pages_count_from_the_first_on_without_a_gap(index: AffinityIndex) -> None:
    assert index.cached_pages("a", chain("1", "2", "4", "9")) == 2
    assert index.cached_pages("a", chain("1", "2", "3", "9")) == 4
    assert index.cached_pages("b", chain("1", "2", "3")) == 1
    assert index.cached_pages("b", chain("5", "1")) == 2
    assert index.cached_pages("a", chain("8", "1")) == 0
    assert index.cached_pages("empty", chain("1")) == 0
    assert index.cached_pages("unknown", chain("1")) == 0
    assert index.cached_pages("a", b"") == 0


def test_the_longest_chain_comes_first_and_the_others_after_it(index: AffinityIndex) -> None:
    loads = {"a": 3, "b": 0, "empty": 1}
    assert index.ranked(chain("1", "2"), loads, 8) == [["a"], ["b", "empty"]]
    assert index.ranked(chain("1", "5"), loads, 8) == [["b"], ["a", "empty"]]


def test_what_several_have_the_load_decides_and_what_nobody_has_too(index: AffinityIndex) -> None:
    loads = {"a": 3, "b": 0, "empty": 1}
    assert index.ranked(chain("1"), loads, 8) == [["a", "b"], ["empty"]]
    assert index.ranked(chain("7"), loads, 8) == [["a", "b", "empty"]]
    assert index.ranked(b"", loads, 8) == [["a", "b", "empty"]]
    assert index.ranked(chain("1"), {}, 8) == []


def test_a_replica_that_is_too_busy_is_passed_over(index: AffinityIndex) -> None:
    assert index.ranked(chain("1", "2"), {"a": 9, "b": 1, "empty": 1}, 8) == [["a"], ["b", "empty"]]
    assert index.ranked(chain("1", "2"), {"a": 10, "b": 1, "empty": 1}, 8) == [["b"], ["a", "empty"]]
    assert index.ranked(chain("2"), {"a": 10, "b": 1}, 8) == [["a", "b"]]


def test_a_summary_takes_the_place_of_the_one_before_and_the_gone_are_forgotten(index: AffinityIndex) -> None:
    index.update("a", chain("5"))
    assert index.cached_pages("a", chain("1")) == 0
    assert index.cached_pages("a", chain("5")) == 1
    index.keep(["b"])
    assert index.cached_pages("a", chain("5")) == 0
    assert index.cached_pages("b", chain("5")) == 1


def test_a_prompt_that_was_sent_counts_until_the_second_summary_without_it(index: AffinityIndex) -> None:
    index.expect("b", chain("1", "2", "3"))
    assert index.cached_pages("b", chain("1", "2", "3", "4")) == 3
    assert index.cached_pages("empty", chain("1", "2")) == 0
    index.update("b", chain("1", "5"))  # the same as before tells nothing
    index.update("b", chain("1", "5", "6"))
    assert index.cached_pages("b", chain("1", "2", "3")) == 3
    index.update("b", chain("1", "2", "5"))
    assert index.cached_pages("b", chain("1", "2", "3")) == 2
    index.expect("unknown", chain("1"))
    assert index.cached_pages("unknown", chain("1")) == 0


class Engine:
    """What `CachedKeys` asks of an engine."""

    def __init__(self, *changes: tuple[list[bytes], list[bytes], bool]) -> None:
        self.changes = list(changes)

    def prefix_changes(self) -> tuple[list[bytes], list[bytes], bool]:
        return self.changes.pop(0)


def test_a_summary_follows_the_cache_and_begins_again_with_it() -> None:
    cached = CachedKeys()
    engine = Engine(
        (keys("1", "2"), [], True),
        (keys("3"), keys("2"), False),
        ([], [], False),
        (keys("4"), [], True),
    )
    assert cached.summary() == b""
    for expected in (("1", "2"), ("1", "3"), ("1", "3"), ("4",)):
        cached.follow(engine)  # type: ignore[arg-type]
        assert cached.summary() == chain(*expected)
    assert cached.summary() is cached.summary()
