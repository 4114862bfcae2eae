"""What a request that enters shares with the cache, or with the request that it was forked from."""

from typing import NamedTuple

import numpy as np

from kv_control.prefix_values import Fork, Place, PrefixMatch
from kv_control.running import Int32Array


class Share(NamedTuple):
    """What a request need not compute: whole `pages` int32 [n] in token order, and a `fork` of the page after them.

    The first `behind` of the pages lie behind the window of what it does compute, and are not held.
    """

    pages: Int32Array
    fork: Fork | None
    place: Place
    match: PrefixMatch | None
    behind: int

    def cached_tokens(self, tokens_per_page: int) -> int:
        """Tokens whose K/V is there already."""
        return self.pages.size * tokens_per_page + (self.fork.tokens if self.fork else 0)

    @property
    def held_pages(self) -> Int32Array:
        """Every page that must stay while the request enters."""
        whole = self.pages[self.behind :]
        return np.append(whole, np.int32(self.fork.source_page)) if self.fork else whole

    def without_fork(self) -> "Share":
        """The whole pages alone."""
        return self._replace(fork=None, match=self.match and self.match._replace(fork=None))
