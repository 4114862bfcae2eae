"""How long a step takes to compile, and that it does not grow with depth: the layer loop compiles one layer.

Two random models that differ only in depth are compiled in turn, so that noise of the machine meets both alike. JSON
lines, and a table on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
from random_llama import write_random_llama
from reporting import figure_from_passes, print_figure

from kv_execution import EngineConfig, PagedEngine
from models import load_model

DEPTHS = (2, 30)
MAX_DISAGREEMENT = 0.25


def main() -> None:
    """Compile the decode step of both depths a few times and print seconds and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=5, help="times that each model is compiled (default 5)")
    passes = parser.parse_args().passes
    jax.config.update("jax_enable_compilation_cache", False)
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    with tempfile.TemporaryDirectory() as folder:
        models = {depth: load_model(write_random_llama(Path(folder) / str(depth), layers=depth)) for depth in DEPTHS}
        for done in range(passes + 1):
            for depth, model in models.items():
                engine = PagedEngine(model, EngineConfig(kv_pool_bytes=8 << 20, max_requests=1, max_context=64))
                engine.init_paged_runtime()
                begin = time.perf_counter()
                engine.prefill_paged([1])
                if done:  # the first pass also warms up the compiler itself
                    seconds[depth].append(time.perf_counter() - begin)
    for depth in DEPTHS:
        report(f"compile.first_token_{depth}_layers", seconds[depth], "s")
    report("compile.ratio_30_to_2_layers", [deep / flat for flat, deep in zip(*seconds.values(), strict=True)], "ratio")


def report(name: str, values: list[float], unit: str) -> None:
    """Print one figure as JSON and as a line for people."""
    workload = {"hidden": 32, "heads": 4, "tokens": 1, "depths": DEPTHS}
    figure = figure_from_passes(
        name,
        values,
        unit,
        workload=workload,
        dtype="float32",
        threads=len(os.sched_getaffinity(0)),
        max_disagreement=MAX_DISAGREEMENT,
    )
    print_figure(figure)
    print(f"{name:<34} {figure.value:8.3f} {unit}  {figure.reason or ''}", file=sys.stderr)


if __name__ == "__main__":
    main()
