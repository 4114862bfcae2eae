"""Engines that take turns on the same workloads, and the figures and limits that come of it.

They run pass by pass, in the opposite order every other pass, and the machine's own limits are measured between the
passes, so that the noise and the drift of a machine meet all alike. A first pass of few tokens is not counted. Each
pass changes the first token of every prompt, so that no engine finds the last pass in its cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gguf_forms import GgufFormError, costs_of
from machine_limits import MachineLimits, dtype_of
from peer_process import PeerProcess
from peer_targets import Measure, limits_of, measures_of
from peer_worker import THREADS
from peers import PeerError
from reporting import Figure, figure_from_passes, print_figure
from rich.console import Console
from workloads import TraceRequest, Workload

MAX_DISAGREEMENT = 0.2
DECODE_TOKENS = 48
WARM_UP_TOKENS = 4
MEMORY_BYTES = 1 << 30
COMPILATION_CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class Entrant(NamedTuple):
    """An engine of the comparison: the command that serves it, the file that it loads, whether it runs traces, and how
    large a number of its K/V is.
    """

    command: list[str]
    path: Path
    traces: bool
    kv_number_bytes: int = 4


def for_pass(name: str, workload: Workload, number: int, vocabulary: int) -> Workload:
    """What pass `number` runs: other first tokens than any other pass, decodes cut short, and pass 0 shorter still."""
    longest = WARM_UP_TOKENS if number == 0 else DECODE_TOKENS if name.startswith("decode") else sys.maxsize

    def changed(request: TraceRequest) -> TraceRequest:
        first = (request.prompt[0] + number) % vocabulary
        return TraceRequest(0.0, (first, *request.prompt[1:]), min(request.max_tokens, longest))

    return Workload(tuple(map(changed, workload.requests)), tuple(map(changed, workload.primer)))


class Comparison:
    """The engines that run, and everything measured so far."""

    def __init__(self, entrants: Mapping[str, Entrant], passes: int, vocabulary: int, console: Console) -> None:
        """Engines by "engine.weights", one of them jaxkv's at most for each kind of weights."""
        self._entrants, self._passes, self._vocabulary, self._console = dict(entrants), passes, vocabulary, console
        self.figures: dict[str, dict[str, Figure]] = {}
        self.limits: dict[str, dict[str, float]] = {}
        self._processes: dict[str, PeerProcess] = {}
        try:
            self._costs = {
                name: costs_of(entry.path, entry.kv_number_bytes)
                for name, entry in entrants.items()
                if name.startswith("jaxkv")
            }
        except GgufFormError as error:
            console.print(f"no fraction of the machine's limit will be known: {error}", markup=False)
            self._costs = {}
        self._machine = MachineLimits(THREADS)
        self._machine_passes: dict[str, list[float]] = {}

    def start(self) -> None:
        """Load all engines, at the same time, since nothing is measured yet."""
        self._processes = {name: PeerProcess(entrant.command) for name, entrant in self._entrants.items()}
        for name, process in list(self._processes.items()):
            try:
                print(json.dumps({"engine": name, **process.about()}), flush=True)
            except PeerError as error:
                self._leave_out(name, error)

    def measure(self, name: str, workload: Workload) -> None:
        """Run `workload` on every engine that takes it, and report it."""
        short = name.startswith(("decode", "prefill"))
        taking = [engine for engine in self._processes if short or self._entrants[engine].traces]
        if not taking:
            return
        kept: dict[str, list[dict[str, Measure]]] = {}
        first_tokens: dict[str, list[int]] = {}
        for number in range(self._passes + 1):
            asked = for_pass(name, workload, number, self._vocabulary)
            for engine in taking if number % 2 == 0 else reversed(taking):
                answer = self._run(engine, asked)
                if answer is not None and number:
                    kept.setdefault(engine, []).append(measures_of(name, asked.requests, answer["token_s"]))
                    first_tokens[engine] = answer["first_tokens"]
            if number:
                self._measure_machine()
        self._console.print(f"{name}: {self._passes} passes of {len(kept)} engines")
        for engine, passes in kept.items():
            about: dict[str, object] = {"workload": name, "requests": len(asked.requests)}
            if taking[0] in first_tokens:
                about[f"first_tokens_as_{taking[0]}"] = sum(
                    map(int.__eq__, first_tokens[engine], first_tokens[taking[0]])
                )
            self._report(engine, name, passes, about)
        self._note_limits(name, asked)

    def measure_startup(self, workload: Workload) -> None:
        """From nothing to the first token, in processes of their own; ours with its compilation cache empty and full.

        `memory_overhead` is the most memory that was ever resident, less weights and pools.
        """
        for engine in [name for name in self._entrants if name.endswith(".stored")]:
            try:
                passes = [self._start_once(engine, workload) for _ in range(self._passes)]
            except PeerError as error:
                del self._entrants[engine]
                self._say_left_out(engine, error)
            else:
                self._report(engine, "startup", passes, {"workload": "startup", "requests": 1})

    def report_machine(self) -> None:
        """The machine's limits as figures."""
        for name, values in self._machine_passes.items():
            unit = "GB/s" if name.startswith("read") else "GFLOP/s"
            print_figure(self._figure(f"machine.{name}", [value / 1e9 for value in values], unit, {}, dtype_of(name)))

    def close(self) -> None:
        """End every process."""
        for process in self._processes.values():
            process.close()
        self._processes = {}

    def _run(self, engine: str, workload: Workload) -> dict[str, Any] | None:
        if engine not in self._processes:
            return None
        try:
            return self._processes[engine].run(workload)
        except PeerError as error:
            self._leave_out(engine, error)
            return None

    def _start_once(self, engine: str, workload: Workload) -> dict[str, Measure]:
        found = {}
        with tempfile.TemporaryDirectory() as cache:
            for name in ("cold", "warm"):
                environment = {**COMPILATION_CACHE, "JAX_COMPILATION_CACHE_DIR": cache}
                process = PeerProcess([*self._entrants[engine].command, "--once"], environment)
                try:
                    answer = process.run(workload)
                    found[name] = Measure(process.age_s, "s")
                finally:
                    process.close()
        peak, about = answer["peak_resident_bytes"], answer["about"]
        found["peak_memory"] = Measure(peak / 2**20, "MiB")
        if "pool_bytes" in about:
            held = about["parameter_bytes"] + about["pool_bytes"]
            found["memory_overhead"] = Measure((peak - held) / 2**20, "MiB")
        return found

    def _measure_machine(self) -> None:
        machine = self._machine
        found = {
            f"{kind}.{method}": value
            for kind, measure in (
                ("multiply_adds", machine.multiply_adds),
                ("bf16_multiply_adds", machine.bf16_multiply_adds),
                ("int8_multiply_adds", machine.int8_multiply_adds),
            )
            for method, value in measure().items()
        }
        sizes = {_weights(engine): costs.weight_bytes for engine, costs in self._costs.items()}
        for size, read_bytes in {**sizes, "memory": MEMORY_BYTES}.items():
            by_method = machine.read_bandwidth(read_bytes)
            found |= {f"read_bandwidth.{size}.{method}": value for method, value in by_method.items()}
        for name, value in found.items():
            self._machine_passes.setdefault(name, []).append(value)

    def _note_limits(self, name: str, workload: Workload) -> None:
        """The machine's limits for our engines: medians over the passes so far, of the best method.

        Blocks of 4 or 8 bits are exact in bfloat16, and so may use what multiplies that, which float32 weights may not;
        what multiplies bytes is for activations of 8 bits.
        """
        for engine, costs in self._costs.items():
            weights = _weights(engine)
            kinds = ["multiply_adds."]
            if weights != "float32":
                kinds.append("bf16_multiply_adds.")
            if weights == "stored_int8":
                kinds.append("int8_multiply_adds.")
            bandwidth, flops = self._best(f"read_bandwidth.{weights}."), max(map(self._best, kinds))
            limits = limits_of(name, workload, costs, bandwidth, flops)
            self.limits.setdefault(engine, {}).update({f"{name}.{key}": value for key, value in limits.items()})

    def _best(self, prefix: str) -> float:
        found = [values for name, values in self._machine_passes.items() if name.startswith(prefix)]
        return max(map(statistics.median, found), default=0.0)

    def _report(
        self, engine: str, workload: str, passes: Sequence[Mapping[str, Measure]], about: Mapping[str, object]
    ) -> None:
        for name, measure in passes[0].items():
            values = [measures[name].value for measures in passes]
            figure = self._figure(f"{engine}.{workload}.{name}", values, measure.unit, about, _weights(engine))
            print_figure(figure)
            self.figures.setdefault(engine, {})[f"{workload}.{name}"] = figure

    def _figure(self, name: str, values: Sequence[float], unit: str, about: Mapping[str, object], dtype: str) -> Figure:
        return figure_from_passes(
            name, values, unit, workload=about, dtype=dtype, threads=THREADS, max_disagreement=MAX_DISAGREEMENT
        )

    def _leave_out(self, engine: str, error: PeerError) -> None:
        self._processes.pop(engine).close()
        self._say_left_out(engine, error)

    def _say_left_out(self, engine: str, error: PeerError) -> None:
        print(json.dumps({"engine": engine, "skipped": str(error)}), flush=True)
        self._console.print(f"{engine} is left out: {error}", markup=False)


def _weights(engine: str) -> str:
    return engine.split(".")[1]
