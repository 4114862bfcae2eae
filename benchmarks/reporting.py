"""Figures as JSON lines: every benchmark prints its results through here, so that they can be compared later.

A figure is measured in several passes; its value is their median, and their spread is printed beside it. Passes that
disagree by more than a stated fraction do not measure what they claim to: such a figure is printed all the same, marked
not reportable with the reason, and nobody has to notice by eye.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

import numpy as np

from kv_common import __version__


@dataclass(frozen=True)
class Spread:
    """How far the passes lie apart."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Figure:
    """One measured number: `value` in `unit` for `workload`, the median of `repeats` passes."""

    name: str
    value: float
    unit: str
    workload: Mapping[str, object]
    dtype: str
    threads: int
    repeats: int
    spread: Spread
    reportable: bool
    reason: str | None
    versions: Mapping[str, str]


def figure_from_passes(
    name: str,
    passes: Sequence[float],
    unit: str,
    *,
    workload: Mapping[str, object],
    dtype: str,
    threads: int,
    max_disagreement: float,
) -> Figure:
    """The figure that `passes` (one measurement of the same thing each) amount to.

    Not reportable below two passes, or when (max - min) / median exceeds `max_disagreement`. Raises ValueError for no
    pass at all.
    """
    if not passes:
        raise ValueError(f"figure {name} has no passes: measure at least once")
    spread = Spread(min(passes), statistics.median(passes), max(passes))
    reason = None
    if len(passes) < 2:
        reason = "one pass has nothing to agree with"
    elif spread.max - spread.min > max_disagreement * abs(spread.median):
        reason = (
            f"{len(passes)} passes span {spread.min:.4g} to {spread.max:.4g} {unit}, "
            f"more than {max_disagreement:.0%} of their median"
        )
    return Figure(
        name=name,
        value=spread.median,
        unit=unit,
        workload=workload,
        dtype=dtype,
        threads=threads,
        repeats=len(passes),
        spread=spread,
        reportable=reason is None,
        reason=reason,
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Versions of what took part in the measurement; jax only where the benchmark imported it."""
    found = {"python": platform.python_version(), "numpy": np.__version__, "jaxkv": __version__}
    if "jax" in sys.modules:
        found["jax"] = sys.modules["jax"].__version__
    return found


def print_figure(figure: Figure, file: TextIO | None = None) -> None:
    """Write `figure` as one JSON line, to standard output unless told otherwise."""
    print(json.dumps(asdict(figure)), file=file or sys.stdout, flush=True)
