"""jaxkv side by side with other engines on this machine, and how far each is from what the machine could do.

Every engine runs the same token ids in a process of its own, with the same number of threads. The engines take turns,
pass by pass, and so do measurements of the machine's own limits. JSON lines: figures, then the targets; tables on
stderr. Peers that are not installed are left out with a line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peer_worker
from gguf_forms import GgufFormError, in_form
from peer_comparison import Comparison, Entrant
from peer_targets import TARGETS, judge
from peer_worker import ENGINES
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tables import print_table
from workloads import TraceRequest, Workload

from kv_common.errors import JaxkvError

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
WORKLOADS = Path(__file__).resolve().parent / "data" / "smollm2_peers.json"
KINDS = ("decode", "prefill", "trace", "prefix", "startup")
QUICK_PROMPT, QUICK_TOKENS = 40, 3
TABLE_WIDTH = 170


class BenchmarkError(JaxkvError):
    """Options that name what is not there, or measure nothing."""


NAMES = (
    *("decode_b1", "decode_b4", "decode_b16", "decode_b32", "prefill_512", "prefill_2048"),
    *("trace", "prefix", "prefix_primed", "startup"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every figure and target; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file")
    parser.add_argument("--passes", type=int, default=3, help="measured passes of each figure (default 3)")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    default = [name for name, engine in ENGINES.items() if engine.by_default]
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=default, metavar="NAME", help=", ".join(ENGINES)
    )
    parser.add_argument("--quick", action="store_true", help="two requests of few tokens of each workload")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)  # wrapped cells cannot be read
    try:
        compare(options, console)
    except JaxkvError as error:
        console.print(str(error), markup=False)
        return 2
    return 0


def compare(options: argparse.Namespace, console: Console) -> None:
    """Run everything that `options` ask for. Raises JaxkvError."""
    if options.passes < 1:
        raise BenchmarkError(f"{options.passes} passes measure nothing: give at least 1")
    if not options.model.is_file():
        raise BenchmarkError(f"{options.model} is missing: run 'make model', or name a GGUF file with --model")
    workloads = read_workloads(WORKLOADS)
    vocabulary = 1 + max(max(request.prompt) for workload in workloads.values() for request in workload.requests)
    if options.quick:
        workloads = {name: shortened(workload) for name, workload in workloads.items()}
    entrants = {}
    for name in options.engines:
        try:
            entrants[name] = entrant_of(name, options.model)
        except GgufFormError as error:
            console.print(f"{name} is left out: {error}", markup=False)
    comparison = Comparison(entrants, options.passes, vocabulary, console)
    try:
        if "startup" in options.workloads:
            comparison.measure_startup(workloads["startup"])
        if chosen := [name for name in options.workloads if name != "startup"]:
            comparison.start()
            for name in chosen:
                comparison.measure(name, workloads[name])
    finally:
        comparison.close()
    comparison.report_machine()
    medians = {
        engine: {name: figure.value for name, figure in figures.items()}
        for engine, figures in comparison.figures.items()
    }
    judged = [judge(target, medians, comparison.limits.get(target.ours, {})) for target in TARGETS]
    for line in filter(None, judged):
        print(json.dumps(line), flush=True)
    measured = list(dict.fromkeys(name for figures in comparison.figures.values() for name in figures))
    groups = {kind: [name for name in measured if name.startswith(kind)] for kind in KINDS}
    print_table("side by side", comparison.figures, groups, console)
    print_targets(list(filter(None, judged)), console)


def entrant_of(name: str, model: Path) -> Entrant:
    """How to start `name` on the form of `model` that it takes, which is written where it does not exist."""
    engine = ENGINES[name]
    path = model if engine.form is None else in_form(model, engine.form, MODEL.parent)
    command = [sys.executable, peer_worker.__file__, name, str(path)]
    return Entrant(command, path, engine.traces, 4 if engine.options.get("kv") == "float32" else 2)


def read_workloads(path: Path) -> dict[str, Workload]:
    """The workloads of a file by name; `prefix_primed` comes after its primer."""
    lists = {
        name: tuple(TraceRequest(0.0, tuple(item["prompt"]), item["max_tokens"]) for item in items)
        for name, items in json.loads(path.read_text(encoding="utf-8")).items()
    }
    primer = lists.pop("prefix_primer")
    return {name: Workload(requests, primer if name == "prefix_primed" else ()) for name, requests in lists.items()}


def shortened(workload: Workload) -> Workload:
    """At most two requests of `workload`, with the beginnings of their prompts, for a few tokens each."""
    requests, primer = (
        tuple(
            TraceRequest(0.0, request.prompt[:QUICK_PROMPT], min(request.max_tokens, QUICK_TOKENS))
            for request in requests[:2]
        )
        for requests in (workload.requests, workload.primer)
    )
    return Workload(requests, primer)


def print_targets(judged: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Every target as a row: met or not, by what, and against whom."""
    table = Table("target", "met", "ratio", "needed", "ours", "best peer", "of limit", box=SIMPLE_HEAD)
    for line in judged:
        needed = f"{'<=' if line['needed_is'] == 'at most' else '>='} {line['needed']:g}"
        peer = f"{line['peer_value']:.4g} {line['peer']}" if line["peer"] else ""
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
        fraction = "" if line["fraction_of_limit"] is None else f"{line['fraction_of_limit']:.0%}"
        met = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}[line["met"]]
        table.add_row(line["target"], met, ratio, needed, f"{line['value']:.4g}", peer, fraction)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
