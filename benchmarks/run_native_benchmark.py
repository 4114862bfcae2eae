"""Steps of a whole engine with the native kernels and with the reference, beside what the machine itself can do.

Decode at several batch sizes and prefill, on the model as it is stored and dequantized to float32. The machine's limits
are measured in the same run, by loops that are none of the kernels'.
Processor seconds are printed beside wall seconds: on a machine that others use only the first compare. JSON lines, and
a table on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from machine_limits import MachineLimits, dtype_of
from reporting import figure_from_passes, print_figure

from kv_execution import EngineConfig, PagedEngine, SamplingParams
from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, DenseWeight
from models import LoadedModel, load_model

MAX_DISAGREEMENT = 0.25
THREADS = len(os.sched_getaffinity(0))
MODEL = Path(__file__).resolve().parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


class Cost(NamedTuple):
    """Wall and processor seconds of one pass."""

    wall_s: float
    processor_s: float


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL), help="GGUF file or checkpoint directory")
    parser.add_argument("--passes", type=int, default=5, help="measured passes of each figure (default 5)")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 32], help="decode batch sizes")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens of the prefill (default 512)")
    parser.add_argument("--providers", nargs="*", default=["native", "reference"])
    parser.add_argument("--weights", nargs="*", choices=("stored", "float32"), default=["stored", "float32"])
    options = parser.parse_args()
    stored = load_model(options.model)
    measure_limits(options.passes, stored.spec.parameter_bytes)
    for weights in options.weights:
        model = stored if weights == "stored" else dequantized(stored)
        for provider in options.providers:
            for batch in options.batches:
                costs = decode_costs(model, provider, batch, options.passes)
                report(f"{provider}.{weights}.decode_{batch}", costs, {"batch": batch}, tokens=batch)
            costs = prefill_costs(model, provider, options.prefill, options.passes)
            report(f"{provider}.{weights}.prefill_{options.prefill}", costs, {}, tokens=options.prefill)


def dequantized(model: LoadedModel) -> LoadedModel:
    """The same model with every matrix in float32."""
    is_weight = lambda leaf: isinstance(leaf, BlockQuantWeight | DenseWeight)  # noqa: E731
    widen = jax.jit(lambda weight: dequantize(weight, jnp.float32))
    params = jax.tree.map(
        lambda leaf: DenseWeight(widen(leaf)) if is_weight(leaf) else leaf, model.params, is_leaf=is_weight
    )
    return replace(model, params=params)


def timed(call: Callable[[], object]) -> Cost:
    """The cost of one call whose result is on the host or is waited for."""
    wall, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return Cost(time.perf_counter() - wall, time.process_time() - processor)


def decode_costs(model: LoadedModel, provider: str, batch: int, passes: int, steps: int = 8) -> list[Cost]:
    """Seconds of one decode step of `batch` requests with short contexts."""
    config = EngineConfig(provider=provider, max_requests=batch, max_step_tokens=max(batch, 16), max_context=256)
    engine = PagedEngine(model, config)
    engine.init_paged_runtime()
    rng = np.random.default_rng(0)
    for _ in range(batch):
        prompt = rng.integers(1, model.spec.vocab_size, 16)
        engine.prefill_paged(prompt, SamplingParams(max_tokens=200, ignore_eos=True))
    engine.generate_paged()

    def run() -> None:
        for _ in range(steps):
            engine.generate_paged()

    return [Cost(*(seconds / steps for seconds in timed(run))) for _ in range(passes)]


def prefill_costs(model: LoadedModel, provider: str, tokens: int, passes: int) -> list[Cost]:
    """Seconds to the first token of a prompt, computed in one chunk."""
    config = EngineConfig(
        provider=provider, max_requests=1, max_step_tokens=tokens, max_context=tokens + 16, prefix_cache=False
    )
    engine = PagedEngine(model, config)
    engine.init_paged_runtime()
    prompt = np.random.default_rng(0).integers(1, model.spec.vocab_size, tokens)

    def run() -> None:
        engine.release(engine.prefill_paged(prompt, SamplingParams(max_tokens=1, ignore_eos=True)).handle)

    run()
    return [timed(run) for _ in range(passes)]


def measure_limits(passes: int, weight_bytes: int) -> None:
    """What the machine reads in a second, over as many bytes as a step reads weights, and multiplies."""
    machine = MachineLimits(THREADS)
    for name, unit, measure in (
        ("read_bandwidth", "GB/s", lambda: machine.read_bandwidth(weight_bytes)),
        ("multiply_adds", "GFLOP/s", machine.multiply_adds),
        ("bf16_multiply_adds", "GFLOP/s", machine.bf16_multiply_adds),
        ("int8_multiply_adds", "GFLOP/s", machine.int8_multiply_adds),
    ):
        found = [measure() for _ in range(passes)]
        for method in found[0]:
            print_limit(f"machine.{name}.{method}", [each[method] / 1e9 for each in found], unit)


def print_limit(name: str, values: list[float], unit: str) -> None:
    """One limit as JSON and as a line for people."""
    figure = figure_from_passes(
        name,
        values,
        unit,
        workload={},
        dtype=dtype_of(name.split(".")[1]),
        threads=THREADS,
        max_disagreement=MAX_DISAGREEMENT,
    )
    print_figure(figure)
    print(f"{name:<36} {figure.value:9.1f} {unit}  {figure.reason or ''}", file=sys.stderr)


def report(name: str, costs: list[Cost], workload: dict[str, object], *, tokens: int) -> None:
    """Wall and processor milliseconds of a step as JSON, and a line for people."""
    values = {"wall": [cost.wall_s * 1e3 for cost in costs], "processor": [cost.processor_s * 1e3 for cost in costs]}
    for clock, passes in values.items():
        figure = figure_from_passes(
            f"{name}.{clock}",
            passes,
            "ms",
            workload={"tokens": tokens, **workload},
            dtype="float32",
            threads=THREADS,
            max_disagreement=MAX_DISAGREEMENT,
        )
        print_figure(figure)
    best = min(values["wall"])
    print(
        f"{name:<36} wall {np.median(values['wall']):8.1f} ms (best {best:8.1f}, {tokens / best * 1e3:7.1f} tokens/s)"
        f"  processor {np.median(values['processor']):8.1f} ms",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
