"""The few shapes that a step may have, so that everything compiled is compiled before the first request.

Each size is rounded up to a ladder of powers of two whose last entry covers its maximum. Two families: *decode* (every
row has one token; tokens == rows) and *mixed* (some row has more), whose row count follows from its tokens, since a
second free axis would square the number of programs. `reachable` is exactly what `shape_for` can return: warm-up
compiles neither a shape too few nor one that no step can have.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_common.errors import JaxkvError

_SEQLEN_RATIO = 4


class BucketError(JaxkvError):
    """Bucket limits that contradict each other, or a step outside them."""


class StepShape(NamedTuple):
    """The padded sizes of one step: query tokens, request rows, and the longest K/V length (tokens) of a row."""

    tokens: int
    rows: int
    max_seqlen_k: int


@dataclass(frozen=True)
class ShapeBuckets:
    """Steps of at most `max_rows` requests and `max_tokens` new tokens, over at most `max_context` tokens a request.

    `min_tokens` and `min_seqlen_k` are the smallest entries of their ladders; both are rounded up to powers of two.
    """

    max_rows: int
    max_tokens: int
    max_context: int
    min_tokens: int = 16
    min_seqlen_k: int = 256
    row_ladder: tuple[int, ...] = field(init=False)
    token_ladder: tuple[int, ...] = field(init=False)
    seqlen_ladder: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens", "max_context", "min_tokens", "min_seqlen_k"):
            if getattr(self, name) < 1:
                raise BucketError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_rows > self.max_tokens:
            raise BucketError(
                f"max_rows {self.max_rows} exceeds max_tokens {self.max_tokens}: a step gives every row a token, "
                "lower max_rows or raise max_tokens"
            )
        object.__setattr__(self, "row_ladder", _ladder(1, self.max_rows, 2))
        object.__setattr__(self, "token_ladder", _ladder(self.min_tokens, self.max_tokens, 2))
        object.__setattr__(self, "seqlen_ladder", _ladder(self.min_seqlen_k, self.max_context, _SEQLEN_RATIO))

    def shape_for(self, tokens: int, rows: int, max_kv_len: int) -> StepShape:
        """The shape that holds a step of `tokens` new tokens in `rows` rows, the longest of `max_kv_len` tokens.

        `max_kv_len` counts the step's own tokens, so it is at least tokens / rows. Raises BucketError.
        """
        if not 1 <= rows <= self.max_rows:
            raise BucketError(f"a step of {rows} rows, outside 1 .. {self.max_rows}: schedule fewer or raise max_rows")
        if not rows <= tokens <= self.max_tokens:
            raise BucketError(
                f"a step of {tokens} tokens in {rows} rows, outside {rows} .. {self.max_tokens}: "
                "give every row a token and chunk the rest"
            )
        shortest = -(-tokens // rows)
        if not shortest <= max_kv_len <= self.max_context:
            raise BucketError(
                f"max_kv_len {max_kv_len} outside {shortest} .. {self.max_context} for {tokens} tokens in {rows} rows: "
                "count the step's own tokens and stop at the context limit"
            )
        seqlen = _round_up(max_kv_len, self.seqlen_ladder)
        if tokens == rows:
            padded = _round_up(rows, self.row_ladder)
            return StepShape(padded, padded, seqlen)
        padded = _round_up(tokens, self.token_ladder)
        return StepShape(padded, self._mixed_rows(padded), seqlen)

    def reachable(self) -> tuple[StepShape, ...]:
        """Every shape that a legal step can have, smallest first."""
        shapes = {StepShape(rows, rows, seqlen) for rows in self.row_ladder for seqlen in self.seqlen_ladder}
        below = 1  # a mixed step has at least 2 tokens
        for tokens in self.token_ladder:
            # Its longest row is shortest when the bucket's fewest tokens are spread over the most rows.
            fewest = below + 1
            shortest = -(-fewest // min(self.max_rows, fewest - 1))
            if shortest <= self.max_context:
                first = bisect_left(self.seqlen_ladder, shortest)
                rows = self._mixed_rows(tokens)
                shapes.update(StepShape(tokens, rows, seqlen) for seqlen in self.seqlen_ladder[first:])
            below = tokens
        return tuple(sorted(shapes))

    def _mixed_rows(self, tokens: int) -> int:
        return min(tokens, self.row_ladder[-1])


def pages_per_row(shape: StepShape, tokens_per_page: int) -> int:
    """Pages that hold the longest K/V length of `shape`."""
    return -(-shape.max_seqlen_k // tokens_per_page)


def page_entries(shape: StepShape, tokens_per_page: int) -> int:
    """Page ids that a step of `shape` can name: every row at the longest length."""
    return shape.rows * pages_per_row(shape, tokens_per_page)


def scrub_entries(shape: StepShape, tokens_per_page: int) -> int:
    """Pages that a step of `shape` can newly reserve: t new tokens open at most t // tokens_per_page + 1 in a row."""
    return shape.tokens // tokens_per_page + shape.rows


def _ladder(smallest: int, largest: int, ratio: int) -> tuple[int, ...]:
    """Powers of two from `smallest` by `ratio`, the last covering `largest` (and never more than twice it)."""
    top = _next_power_of_two(largest)
    entries = []
    entry = _next_power_of_two(smallest)
    while entry < top:
        entries.append(entry)
        entry *= ratio
    return (*entries, top)


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _round_up(value: int, ladder: tuple[int, ...]) -> int:
    return ladder[bisect_left(ladder, value)]
