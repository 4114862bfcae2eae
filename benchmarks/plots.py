"""Pictures of what the passes showed: how long requests waited, and what happened over time.

Distributions are of all measured passes together; what runs over time is of the pass whose duration is the median.
matplotlib comes with the extra `bench` and is imported only where a picture is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from latency import Slo
from occupancy import StepSample
from replay import Replay

from kv_common.errors import JaxkvError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Sequence[Replay]]
"""Replays of the measured passes by the name of their arm."""

COLORS = ("#0f6e8c", "#d9793b")
INK, SOFT, FAINT = "#22303c", "#5b6873", "#9aa5ae"


class PlotError(JaxkvError):
    """A picture that cannot be drawn or written."""


def require_plotting(path: Path) -> None:
    """Raises PlotError where matplotlib is missing or there is no folder for `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install 'jaxkv[bench]', or leave out --plot")
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.parent}, make it or name another")


def plot_serving(
    path: Path,
    results: Results,
    *,
    headline: str,
    title: str,
    tokens_per_page: Mapping[str, int],
    budget_tokens: int,
    slo: Slo,
) -> None:
    """TTFT and ITL distributions, K/V memory and requests over time. Raises PlotError where `path` is not writable."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (ttft, itl, memory, requests) = _four_panels(headline, title)
    _label(ttft, "Time to first token", "seconds from arrival", "of requests")
    _label(itl, "Inter-token latency", "seconds between two tokens", "of tokens")
    _label(memory, "K/V memory: dealt (line) and filled with tokens (area)", "seconds", "of the budget")
    _label(requests, "Requests running (line) and waiting (dashed)", "seconds", "requests")
    itl.set_xscale("log")
    itl.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    itl.xaxis.set_major_formatter("{x:g}")
    itl.xaxis.set_minor_formatter(NullFormatter())
    for (name, passes), color in zip(results.items(), COLORS, strict=False):
        _distribution(ttft, name, _ttfts(passes), color)
        _distribution(itl, name, list(chain(*(request.itl_s for each in passes for request in each.requests))), color)
        samples = _typical(passes).samples
        at = _times(samples)
        dealt = np.array([sample.pages_held for sample in samples]) * tokens_per_page[name] / budget_tokens
        # With shared pages more tokens are held than there are slots; the area then reaches above the line.
        filled = np.array([sample.tokens_held for sample in samples]) / budget_tokens
        memory.fill_between(at, filled, step="post", color=color, alpha=0.25, linewidth=0)
        memory.step(at, dealt, where="post", color=color, label=name)
        requests.step(at, [sample.running for sample in samples], where="post", color=color, label=name)
        waiting = [sample.waiting for sample in samples]
        requests.step(at, waiting, where="post", color=color, linestyle=(0, (2, 2)), linewidth=1.2)
    for axes, limit in ((ttft, slo.ttft_s), (itl, slo.itl_s)):
        if limit < axes.get_xlim()[1]:
            axes.axvline(limit, color=FAINT, linewidth=1, linestyle="--")
            axes.annotate("SLO", (limit, 0.03), xytext=(4, 0), textcoords="offset points", color=FAINT)
    for axes in (ttft, memory, requests):
        axes.set_xlim(left=0)
    _percent(memory)
    memory.set_ylim(bottom=0)
    requests.set_ylim(bottom=0)
    _save(figure, path)


def plot_prefix_cache(path: Path, results: Results, *, headline: str, title: str, capacity_pages: int) -> None:
    """TTFT by distribution and by request, tokens computed and pages over time. Raises PlotError as above."""
    figure, (ttft, by_request, computed, pages) = _four_panels(headline, title)
    _label(ttft, "Time to first token", "seconds from arrival", "of requests")
    _label(by_request, "Time to first token of each request", "request, in order of arrival", "seconds")
    _label(computed, "Tokens computed", "seconds", "tokens")
    _label(pages, "Pages held by requests (line), and kept by the cache (area on top)", "seconds", "pages")
    for (name, passes), color in zip(results.items(), COLORS, strict=False):
        label = f"cache {name}"
        typical = _typical(passes)
        samples = typical.samples
        _distribution(ttft, label, _ttfts(passes), color)
        waits = [request.ttft_s for request in typical.requests]
        by_request.plot(range(1, len(waits) + 1), waits, "o", markersize=5, color=color, label=label)
        at = _times(samples)
        total = np.array([sample.computed_tokens for sample in samples])
        total -= total[-1] - typical.counts.computed_tokens
        computed.plot(at, total, color=color, label=label)
        computed.annotate(
            f"{total[-1]:,}", (at[-1], total[-1]), xytext=(-4, 5), textcoords="offset points", color=color, ha="right"
        )
        held = np.array([sample.pages_held for sample in samples])
        cached = np.array([sample.cached_pages for sample in samples])
        pages.fill_between(at, held, held + cached, step="post", color=color, alpha=0.25, linewidth=0)
        pages.step(at, held, where="post", color=color, label=label)
    if pages.get_ylim()[1] > 0.5 * capacity_pages:
        pages.axhline(capacity_pages, color=FAINT, linewidth=1, linestyle="--")
        pages.annotate("pool", (0, capacity_pages), xytext=(4, 4), textcoords="offset points", color=SOFT)
        pages.set_ylim(top=1.1 * capacity_pages)
    for axes in (ttft, computed, pages):
        axes.set_xlim(left=0)
    for axes in (by_request, computed, pages):
        axes.set_ylim(bottom=0)
    _save(figure, path)


def _four_panels(headline: str, title: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
    figure = Figure(figsize=(12, 7.6), layout=engine, facecolor="white")
    figure.suptitle(f"{headline}\n", x=0.015, ha="left", fontsize=14, fontweight="bold", color=INK)
    figure.text(0.015, 0.945, title, ha="left", va="top", fontsize=10, color=SOFT)
    return figure, list(figure.subplots(2, 2).flat)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=8)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=9, colors=INK, length=3, color=FAINT)
    axes.grid(color="#e6eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def _distribution(axes: Axes, label: str, values: Sequence[float], color: str) -> None:
    """The part of `values` at or below x, with a mark at the median."""
    if not values:
        return
    axes.ecdf(values, color=color, label=label, linewidth=1.8)
    axes.plot([float(np.median(values))], [0.5], "o", color=color, markersize=5)
    _percent(axes)


def _percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _ttfts(passes: Sequence[Replay]) -> list[float]:
    return [request.ttft_s for each in passes for request in each.requests]


def _typical(passes: Sequence[Replay]) -> Replay:
    return sorted(passes, key=lambda each: each.duration_s)[len(passes) // 2]


def _times(samples: Sequence[StepSample]) -> np.ndarray:
    return np.array([sample.end_s for sample in samples])


def _save(figure: Figure, path: Path) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=2, frameon=False, fontsize=11, labelcolor=INK)
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path} cannot be written ({error}): name a .png file in a folder of yours") from None
