"""Host cost of the prefix trie, in microseconds per page, as the number of cached pages grows.

Each pool is filled with conversations that share their first page and were let go of in random order, in pages that are
scattered. Then a prompt is matched and published, and the longest unused pages make room, once for a whole prompt and
once for a few pages at a time. A cost per page that grows in proportion to the cached pages would mean that something
walks the trie; misses of the CPU's caches make it grow a little. Time is CPU time of this thread, because it holds
still on a machine that others use. JSON lines, and a table on stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from reporting import figure_from_passes, print_figure

from kv_control.page_allocator import PageAllocator
from kv_control.prefix_trie import PrefixTrie
from kv_control.prefix_values import root_place

TOKENS_PER_PAGE = 16
PROMPT_PAGES = 2048
CONVERSATION_PAGES = 100
FEW_PAGES = 16
VOCABULARY = 50_000
NAMESPACE = b"the digest of a cache namespace."
MAX_DISAGREEMENT = 0.25


class Costs(NamedTuple):
    """Microseconds per page of each pass.

    match: a cached prompt, hashed; match_again: the same with the keys at hand; publish: a new prompt at once, hashed;
    publish_one: page by page, as decoding fills them; evict: a prompt's worth of pages; evict_few: 16 at a time.
    """

    match: list[float]
    match_again: list[float]
    publish: list[float]
    publish_one: list[float]
    evict: list[float]
    evict_few: list[float]


def main() -> None:
    """Measure every size and print its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=7, help="measurements of each size (default 7)")
    parser.add_argument(
        "--cached-pages", type=int, nargs="+", default=[10**4, 10**5, 10**6], help="sizes (default 10^4 10^5 10^6)"
    )
    arguments = parser.parse_args()
    print(f"{'cached pages':<12} " + " ".join(f"{name:>12}" for name in Costs._fields), file=sys.stderr)
    for cached_pages in arguments.cached_pages:
        report(cached_pages, measure(cached_pages, arguments.passes))


def measure(cached_pages: int, passes: int) -> Costs:
    """Time `passes` rounds over a trie of about `cached_pages` pages, after one round that does not count."""
    trie = filled_trie(cached_pages)
    rng = np.random.default_rng(1)
    rounds = [one_round(trie, rng) for _ in range(passes + 1)][1:]
    trie.check_invariants()
    return Costs(*(list(passes_of_one) for passes_of_one in zip(*rounds, strict=True)))


def one_round(trie: PrefixTrie, rng: np.random.Generator) -> tuple[float, ...]:
    """Publish two prompts, match one of them, and evict as many pages as came in: the order of `Costs`."""
    allocator = trie.allocator
    prompt, decoded = (rng.integers(0, VOCABULARY, PROMPT_PAGES * TOKENS_PER_PAGE, np.int32) for _ in range(2))
    pages = deal(allocator, 2 * PROMPT_PAGES)
    held, rest = pages[:PROMPT_PAGES], pages[PROMPT_PAGES:]
    publish = us_per_page(lambda: trie.publish(root_place(NAMESPACE), prompt, held))
    publish_one = us_per_page(lambda: publish_page_by_page(trie, decoded, rest))
    keys = trie.match(NAMESPACE, prompt).keys
    match = us_per_page(lambda: trie.match(NAMESPACE, prompt))
    match_again = us_per_page(lambda: trie.match(NAMESPACE, prompt, keys=keys))
    allocator.release(held)
    allocator.release(rest)
    evict = us_per_page(lambda: trie.evict(PROMPT_PAGES))
    evict_few = us_per_page(lambda: [trie.evict(FEW_PAGES) for _ in range(PROMPT_PAGES // FEW_PAGES)])
    return match, match_again, publish, publish_one, evict, evict_few


def us_per_page(work: Callable[[], object]) -> float:
    """CPU microseconds that `work` on a prompt's pages takes per page."""
    start = time.thread_time()
    work()
    return (time.thread_time() - start) / PROMPT_PAGES * 1e6


def publish_page_by_page(trie: PrefixTrie, tokens: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
    """Publish each page of a path by itself."""
    place = root_place(NAMESPACE)
    for page, content in zip(pages, tokens.reshape(-1, TOKENS_PER_PAGE), strict=True):
        place = trie.publish(place, content, page).place


def filled_trie(cached_pages: int) -> PrefixTrie:
    """A trie of conversations, none of them running."""
    allocator = PageAllocator(cached_pages + 4 * PROMPT_PAGES + 1)
    trie = PrefixTrie(allocator, TOKENS_PER_PAGE)
    rng = np.random.default_rng(0)
    # Freed in random order once: what is dealt afterwards is scattered over the pool.
    everything = rng.permutation(allocator.allocate(allocator.free_pages))
    for start in range(0, everything.size, 64):
        allocator.release(everything[start : start + 64])
    first_page = rng.integers(0, VOCABULARY, TOKENS_PER_PAGE, np.int32)
    conversations = []
    for _ in range(max(1, cached_pages // CONVERSATION_PAGES)):
        tokens = rng.integers(0, VOCABULARY, CONVERSATION_PAGES * TOKENS_PER_PAGE, np.int32)
        tokens[:TOKENS_PER_PAGE] = first_page
        published = trie.publish(root_place(NAMESPACE), tokens, deal(allocator, CONVERSATION_PAGES))
        conversations.append(published.pages)
    for index in rng.permutation(len(conversations)):
        allocator.release(conversations[index])
    return trie


def deal(allocator: PageAllocator, count: int) -> NDArray[np.int32]:
    """Clean pages."""
    pages = allocator.allocate(count)
    allocator.confirm_scrubbed(pages)
    return pages


def report(cached_pages: int, costs: Costs) -> None:
    """Print the figures of one size and its row of the table."""
    workload = {"cached_pages": cached_pages, "prompt_pages": PROMPT_PAGES, "tokens_per_page": TOKENS_PER_PAGE}
    row, noisy = [], []
    for name, passes in costs._asdict().items():
        figure = figure_from_passes(
            f"prefix_trie.{name}",
            passes,
            "us/page",
            workload=workload,
            dtype="int32",
            threads=1,
            max_disagreement=MAX_DISAGREEMENT,
        )
        print_figure(figure)
        row.append(f"{figure.value:>12.3f}")
        noisy += [] if figure.reportable else [name]
    note = f"  passes disagree: {', '.join(noisy)}" if noisy else ""
    print(f"{cached_pages:>12} {' '.join(row)}{note}", file=sys.stderr)


if __name__ == "__main__":
    main()
