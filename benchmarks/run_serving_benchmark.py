"""Serving under load: latency, throughput, goodput and K/V memory, paged against dense at an equal K/V budget.

Two arms, which share the model, the kernels and the number of K/V bytes, and differ in how these are dealt. `paged`:
pages of 16 tokens, taken as a request grows, shared where prompts begin alike. `dense`: a fixed-slot contiguous cache,
that is, the same engine with one page per request, which holds the longest request of the trace, and with the prefix
cache off. The budget is so many slots, not counting the padding page that each arm has on top; a slot is a multiple of
128 tokens, which kernels can read in parts, so that it costs a short request no more than pages do. Every request
generates exactly the tokens it asks for, greedily.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from arms import (
    DATA,
    add_run_options,
    alternate,
    budget_for,
    dense_config,
    open_benchmark_model,
    paged_config,
    progress_console,
    report_bugs,
    require_fit,
    require_passes,
    slot_tokens_for,
    start_arms,
)
from latency import Slo
from measures import Measures, figures_of, ratios, serving_measures
from plots import plot_serving, require_plotting
from replay import Replay
from reporting import Figure, print_figure
from rich.console import Console
from tables import print_table
from workloads import Lengths, Workload, closed_batch, poisson_arrivals, read_workload

from kv_common.errors import JaxkvError

TINY = {
    "trace": "closed",
    "requests": 8,
    "prompt_tokens": 40,
    "output_tokens": 12,
    "slots": 2,
    "max_requests": 4,
    "max_step_tokens": 16,
    "rate": 100.0,
}
GROUPS = {
    "latency": [f"{name}_p{percent}" for name in ("ttft", "itl", "e2e") for percent in (50, 90, 99)],
    "throughput": ["output_throughput", "request_throughput", "goodput", "slo_met"],
    "made of": [
        "mean_running",
        "steps",
        "step_time",
        "tokens_per_step",
        "waiting_share",
        "preemptions",
        "hit_tokens",
    ],
    "memory, shapes": ["page_overhead", "leaked_pages", "shapes_used", "traces", "compilations"],
}
COMPARED = [
    *(f"{name}_p{percent}" for name in ("ttft", "itl", "e2e") for percent in (50, 90, 99)),
    *("output_throughput", "request_throughput", "goodput", "mean_running", "steps", "step_time", "tokens_per_step"),
    *("waiting_share", "page_overhead"),
]


HEADLINE = ("output_throughput", "ttft_p50")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 where pages leaked or something compiled while measuring, 2 for a bad request."""
    options = parse(arguments)
    try:
        return run(options)
    except JaxkvError as error:
        print(error, file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the small sizes of --tiny where it is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_run_options(parser)
    parser.add_argument("--tiny", action="store_true", help="a random two-layer model and a small trace: seconds")
    parser.add_argument("--arm", choices=("paged", "dense", "both"), default="both")
    parser.add_argument("--trace", choices=("closed", "poisson", "file"), default="file")
    parser.add_argument("--file", type=Path, default=DATA / "smollm2_trace.json", help="the requests of --trace file")
    parser.add_argument("--requests", type=int, default=12, help="how many; of a file the first ones (default 12)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="longest synthetic prompt (default 256)")
    parser.add_argument("--output-tokens", type=int, default=64, help="longest synthetic answer (default 64)")
    parser.add_argument("--vary", type=float, default=0.75, help="lengths go down by this fraction (default 0.75)")
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second of --trace poisson (default 0.5)")
    parser.add_argument("--slots", type=int, default=4, help="K/V budget: so many dense slots (default 4)")
    parser.add_argument("--max-requests", type=int, default=16, help="requests at once, memory allowing (default 16)")
    parser.add_argument("--max-step-tokens", type=int, default=256, help="token budget of a step (default 256)")
    parser.add_argument("--slo-ttft-s", type=float, default=10.0, help="goodput: time to first token (default 10)")
    parser.add_argument("--slo-itl-s", type=float, default=0.5, help="goodput: mean inter-token latency (default 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of synthetic traces (default 0)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the distributions and the memory over time")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Measure and report. Raises JaxkvError for whatever the options ask that cannot be."""
    console = progress_console()
    require_passes(options.passes)
    # A bad file, or a plot that cannot be drawn, is found before a model is loaded.
    from_file = read_workload(options.file, options.requests) if options.trace == "file" else None
    if options.plot:
        require_plotting(options.plot)
    model = open_benchmark_model(options.model, tiny=options.tiny, console=console)
    workload = from_file or synthetic(options, model.spec.vocab_size)
    require_fit(workload, model.spec)
    slo = Slo(options.slo_ttft_s, options.slo_itl_s)
    budget = budget_for(model.spec, options.slots, slot_tokens_for(workload.longest_context))
    limits = {
        "max_requests": options.max_requests,
        "max_step_tokens": options.max_step_tokens,
        "max_context": workload.longest_context,
    }
    configs = {"paged": paged_config(budget, **limits), "dense": dense_config(budget, **limits)}
    if options.arm != "both":
        configs = {options.arm: configs[options.arm]}
    arms = start_arms(model, configs, console)
    results = alternate(arms, workload, options.passes, console, in_a_few_words)

    described = describe(options, workload, budget.capacity_bytes) | {"model": model.spec.name, **limits}
    measured = {
        arm.name: [serving_measures(result, slo, arm.engine.config.tokens_per_page) for result in results[arm.name]]
        for arm in arms
    }
    columns = figures_by_column(measured, described, model.spec.dtype)
    title = (
        f"{model.spec.name}, {len(workload.requests)} requests ({options.trace}), "
        f"K/V of {budget.capacity_tokens:,} tokens ({budget.capacity_bytes / 2**20:.1f} MiB)"
    )
    if options.json:
        for figure in chain.from_iterable(figures.values() for figures in columns.values()):
            print_figure(figure)
    else:
        print_table(title, columns, GROUPS, Console())
    if options.plot:
        unsure = any(not figures[name].reportable for figures in columns.values() for name in HEADLINE)
        doubt = "; passes disagree" if unsure else ""
        plot_serving(
            options.plot,
            results,
            headline=headline(columns),
            title=f"{title}{doubt}",
            tokens_per_page={arm.name: arm.engine.config.tokens_per_page for arm in arms},
            budget_tokens=budget.capacity_tokens,
            slo=slo,
        )
        console.print(f"plot: {options.plot}")
    return int(report_bugs(results, console))


def synthetic(options: argparse.Namespace, vocab_size: int) -> Workload:
    """The trace that the options describe. Raises WorkloadError."""
    lengths = Lengths(options.prompt_tokens, options.output_tokens, options.vary)
    if options.trace == "closed":
        return closed_batch(options.requests, lengths, vocab_size=vocab_size, seed=options.seed)
    return poisson_arrivals(options.requests, options.rate, lengths, vocab_size=vocab_size, seed=options.seed)


def describe(options: argparse.Namespace, workload: Workload, kv_bytes: int) -> dict[str, Any]:
    """The workload of a figure: everything that its value depends on but the machine."""
    described: dict[str, Any] = {
        "trace": options.trace,
        "requests": len(workload.requests),
        "prompt_tokens": sum(len(request.prompt) for request in workload.requests),
        "output_tokens": sum(request.max_tokens for request in workload.requests),
        "kv_capacity_bytes": kv_bytes,
        "slots": options.slots,
        "slo_ttft_s": options.slo_ttft_s,
        "slo_itl_s": options.slo_itl_s,
    }
    if options.trace == "file":
        return described | {"file": options.file.name}
    described |= {"seed": options.seed, "vary": options.vary}
    return described | {"rate": options.rate} if options.trace == "poisson" else described


def figures_by_column(
    measured: dict[str, list[Measures]], workload: dict[str, Any], dtype: str
) -> dict[str, dict[str, Figure]]:
    """Figures of each arm and, where there are two, of one over the other."""
    columns = {
        name: figures_of(f"serving.{name}", passes, workload=workload, dtype=dtype) for name, passes in measured.items()
    }
    if len(measured) == 2:
        compared = ratios(measured["paged"], measured["dense"], COMPARED)
        columns["paged/dense"] = figures_of("serving.paged_over_dense", compared, workload=workload, dtype=dtype)
    return columns


def headline(columns: dict[str, dict[str, Figure]]) -> str:
    """What the picture shows, in a sentence."""
    compared = columns.get("paged/dense")
    if compared is None:
        (name, figures), *_ = columns.items()
        return f"{name.capitalize()}: {figures['output_throughput'].value:.3g} tokens/s"
    throughput, ttft = (compared[name] for name in HEADLINE)
    return f"Paged: {throughput.value:.2f} x the throughput and {ttft.value:.2f} x the median TTFT of dense"


def in_a_few_words(result: Replay) -> str:
    """How a pass went, for progress."""
    tokens = sum(map(len, result.tokens))
    return f"{result.duration_s:.1f} s, {tokens / result.duration_s:.1f} tokens/s, {result.counts.steps} steps"


if __name__ == "__main__":
    sys.exit(main())
