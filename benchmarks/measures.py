"""The numbers of one pass by name, and the figures that the same number of several passes amounts to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from latency import PERCENTILES, Slo, goodput, percentile
from occupancy import mean_running, page_overhead, waiting_share
from replay import Replay
from reporting import Figure, figure_from_passes

MAX_DISAGREEMENT = 0.2


class Measure(NamedTuple):
    """One number of one pass."""

    value: float
    unit: str


Measures = dict[str, Measure]


def latency_measures(result: Replay) -> Measures:
    """Percentiles of TTFT, ITL and end-to-end time, seconds."""
    requests = result.requests
    series = {
        "ttft": [request.ttft_s for request in requests],
        "itl": list(chain.from_iterable(request.itl_s for request in requests)),
        "e2e": [request.e2e_s for request in requests],
    }
    return {
        f"{name}_p{percent}": Measure(percentile(values, percent), "s")
        for name, values in series.items()
        for percent in PERCENTILES
    }


def serving_measures(result: Replay, slo: Slo, tokens_per_page: int) -> Measures:
    """Latency, throughput, goodput, memory, and what they are made of."""
    counts, samples = result.counts, result.samples
    output_tokens = sum(map(len, result.tokens))
    busy_s = sum(sample.duration_s for sample in samples)
    good = goodput(result.requests, slo, result.duration_s)
    e2e_s = sum(request.e2e_s for request in result.requests)
    return {
        **latency_measures(result),
        "output_throughput": Measure(output_tokens / result.duration_s, "tokens/s"),
        "request_throughput": Measure(len(result.requests) / result.duration_s, "requests/s"),
        "goodput": Measure(good, "requests/s"),
        "slo_met": Measure(good * result.duration_s / len(result.requests), "of requests"),
        "mean_running": Measure(mean_running(samples), "requests"),
        "waiting_share": Measure(waiting_share(samples, e2e_s), "of time"),
        "steps": Measure(counts.steps, "steps"),
        "step_time": Measure(busy_s / counts.steps, "s/step"),
        "tokens_per_step": Measure(counts.computed_tokens / counts.steps, "tokens/step"),
        "preemptions": Measure(counts.preemptions, "preemptions"),
        "hit_tokens": Measure(counts.hit_tokens, "tokens"),
        "page_overhead": Measure(page_overhead(samples, tokens_per_page), "slots/token"),
        "leaked_pages": Measure(counts.leaked_pages, "pages"),
        **compile_measures(result),
    }


def compile_measures(result: Replay) -> Measures:
    """Shapes seen so far, and what was traced and compiled during the pass."""
    counts = result.counts
    return {
        "shapes_used": Measure(counts.shapes_used, "shapes"),
        "traces": Measure(counts.traces, "traces"),
        "compilations": Measure(counts.compilations, "programs"),
    }


def ratios(one: Sequence[Measures], other: Sequence[Measures], names: Sequence[str]) -> list[Measures]:
    """`one` over `other`, pass by pass, for those of `names` that `other` does not have as 0."""
    return [
        {
            name: Measure(mine[name].value / theirs[name].value, "ratio")
            for name in names
            if all(measures[name].value for measures in other)
        }
        for mine, theirs in zip(one, other, strict=True)
    ]


def figures_of(
    prefix: str, passes: Sequence[Measures], *, workload: Mapping[str, object], dtype: str
) -> dict[str, Figure]:
    """A figure for each measure of `passes`, named `prefix`.measure; by the name of the measure."""
    return {
        name: figure_from_passes(
            f"{prefix}.{name}",
            [measures[name].value for measures in passes],
            first.unit,
            workload=workload,
            dtype=dtype,
            threads=len(os.sched_getaffinity(0)),
            max_disagreement=MAX_DISAGREEMENT,
        )
        for name, first in passes[0].items()
    }
