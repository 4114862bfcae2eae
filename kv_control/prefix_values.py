"""What the prefix trie gives out: matches, places, results of publishing, statistics, and why a match ended.

Values only, all immutable, so that a match can be looked at, compared with the free pages and dropped, with nothing to
undo: it takes effect when `PrefixTrie.hold` is called with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_common.layout import PADDING_PAGE


class MissReason(StrEnum):
    """Why a match reaches no further."""

    NONE = "none"
    """Every full page of the prompt was found; what is left does not fill one."""
    LAST_TOKEN = "last_token"
    """Every page was found, and the last is not taken whole because one token has to be computed."""
    NO_SUCH_PREFIX = "no_such_prefix"
    """The next page was not cached, or so long ago that it is forgotten."""
    EVICTED = "evicted"
    """The next page was cached and had to make room."""
    NAMESPACE = "namespace"
    """The first page is cached, under another namespace only."""
    UNCACHEABLE = "uncacheable"
    """The request asked not to read the cache."""


class Place(NamedTuple):
    """A path in the trie, by its last node: `pages` full pages, of which `page` is the last and `key` the key.

    A namespace's root is page 0 with the namespace digest as its key. A place below the root is good for as long as its
    owner holds the pages of the path; after a reset it is noticed to be gone.
    """

    page: int
    key: bytes
    pages: int


NOWHERE = Place(-1, b"", 0)
"""The place of a request that can publish no more."""


def root_place(namespace: bytes) -> Place:
    """Where the paths of the namespace with this digest start."""
    return Place(PADDING_PAGE, namespace, 0)


class Fork(NamedTuple):
    """The next page starts with the first `tokens` tokens of `source_page`: copy the page and go on behind them."""

    source_page: int
    tokens: int


class PrefixMatch(NamedTuple):
    """The longest cached path of a prompt that leaves at least one of its tokens to compute.

    `pages` int32 [n] in token order, `page_tokens` in them; `place` where they end; `keys` of every full page of the
    prompt, to be passed to later calls; `generation` of the trie, which moves on when pages leave it.
    """

    pages: NDArray[np.int32]
    place: Place
    fork: Fork | None
    page_tokens: int
    asked_tokens: int
    miss_reason: MissReason
    keys: list[bytes]
    generation: int

    @property
    def pages_to_hold(self) -> NDArray[np.int32]:
        """The pages [n] or [n + 1] that have to stay until the match has taken effect."""
        return np.append(self.pages, np.int32(self.fork.source_page)) if self.fork else self.pages

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.page_tokens + (self.fork.tokens if self.fork else 0)

    @property
    def missing_key(self) -> bytes | None:
        """The key of the first full page that the match does not have, or None where it has them all."""
        return self.keys[self.pages.size] if self.pages.size < len(self.keys) else None


class Published(NamedTuple):
    """`place` to publish from next, and the `pages` int32 [n] that the caller holds now.

    These differ from what it passed at the `duplicates` pages that were cached already; its own were released.
    """

    place: Place
    pages: NDArray[np.int32]
    duplicates: int


class PrefixStatistics(NamedTuple):
    """Counters since the start. A lookup is a match that was held; each has one reason in `misses`.

    `hit_tokens` of `asked_tokens` were not computed. `published` pages entered the trie, `duplicates` were merged with
    pages that were there, `evictions` made room; `cached_pages` are in the trie now, whoever else holds them.
    """

    lookups: int
    asked_tokens: int
    hit_tokens: int
    misses: Mapping[MissReason, int]
    published: int
    duplicates: int
    evictions: int
    cached_pages: int
