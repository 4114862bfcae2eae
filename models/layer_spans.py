"""Layers of different kinds as loops: the decoder's layers in order, cut into spans that repeat a period.

A span is compiled once as the body of a loop, whatever its repeats, so a model whose layers alternate costs one period
and not its depth. Layers that fit no period stand alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

Kind = TypeVar("Kind", bound=Hashable)


class LayerSpan(NamedTuple, Generic[Kind]):
    """Layers first, first + 1, ...: `repeats` times the kinds of `period`."""

    first: int
    repeats: int
    period: tuple[Kind, ...]


def layer_spans(kinds: Sequence[Kind]) -> list[LayerSpan[Kind]]:
    """Spans that cover `kinds` in order; from each layer on the one that covers most, of the shortest period."""
    spans: list[LayerSpan[Kind]] = []
    first = 0
    while first < len(kinds):
        rest = tuple(kinds[first:])
        best = LayerSpan(first, 1, rest[:1])
        for size in range(1, len(rest) // 2 + 1):
            if best.repeats * len(best.period) == len(rest):
                break
            repeats = 1
            while rest[repeats * size : (repeats + 1) * size] == rest[:size]:
                repeats += 1
            if repeats > 1 and repeats * size > best.repeats * len(best.period):
                best = LayerSpan(first, repeats, rest[:size])
        spans.append(best)
        first += best.repeats * len(best.period)
    return spans
