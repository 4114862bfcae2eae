"""The engines that a benchmark compares, and how their passes alternate.

All arms share one loaded model and differ in their `EngineConfig` alone. They run pass by pass in turn, in the opposite
order every other pass, so that the noise and the drift of a machine meet each alike; the first pass of each is run and
thrown away, and every pass starts with an empty prefix cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from random_llama import write_random_llama
from replay import Replay, replay
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from workloads import Workload

from kv_common.errors import JaxkvError
from kv_common.layout import KvStorageLayoutV1
from kv_common.model_spec import ModelSpec
from kv_execution import EngineConfig, PagedEngine
from kv_serving.session import open_model, start_engine
from models import LoadedModel, load_model

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).resolve().parent / "data"
TOKENS_PER_PAGE = 16
SLOT_MULTIPLE = 128


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of a model asks: which one, how many passes, and how to report."""
    parser.add_argument("model", nargs="?", help="GGUF file or checkpoint directory (default: that of 'make model')")
    parser.add_argument("--passes", type=int, default=3, help="measured passes, after a discarded one (default 3)")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout instead of a table")


class BenchmarkError(JaxkvError):
    """Options of a benchmark that contradict each other or name what is not there."""


class Arm(NamedTuple):
    """One of the engines compared."""

    name: str
    engine: PagedEngine


class KvBudget(NamedTuple):
    """K/V memory for `slots` times `slot_tokens` tokens, the padding page left out.

    Page 0 holds no request, so each arm gets one page of its own size on top of the same budget.
    """

    slots: int
    slot_tokens: int
    bytes_per_token: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the budget holds."""
        return self.slots * self.slot_tokens

    @property
    def capacity_bytes(self) -> int:
        """Bytes of K and V for them."""
        return self.capacity_tokens * self.bytes_per_token

    def pool_bytes(self, tokens_per_page: int) -> int:
        """What `EngineConfig.kv_pool_bytes` has to be for this budget in pages of `tokens_per_page`."""
        return self.capacity_bytes + tokens_per_page * self.bytes_per_token


def slot_tokens_for(longest_context: int) -> int:
    """Tokens of a dense slot that any request of a trace fits."""
    return -(-longest_context // SLOT_MULTIPLE) * SLOT_MULTIPLE


def budget_for(spec: ModelSpec, slots: int, slot_tokens: int) -> KvBudget:
    """The budget of `slots` slots. Raises BenchmarkError where that is not one token."""
    if min(slots, slot_tokens) < 1:
        raise BenchmarkError(f"K/V memory of {slots} x {slot_tokens} tokens holds no request: give at least 1")
    one_token = KvStorageLayoutV1(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_pages=2,
        tokens_per_page=1,
        dtype=spec.dtype,
    )
    return KvBudget(slots, slot_tokens, one_token.bytes_per_page)


def paged_config(
    budget: KvBudget, *, max_requests: int, max_step_tokens: int, max_context: int, prefix_cache: bool = True
) -> EngineConfig:
    """Pages of 16 tokens, dealt as requests grow."""
    return EngineConfig(
        kv_pool_bytes=budget.pool_bytes(TOKENS_PER_PAGE),
        tokens_per_page=TOKENS_PER_PAGE,
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
        max_context=max_context,
        prefix_cache=prefix_cache,
    )


def dense_config(budget: KvBudget, *, max_requests: int, max_step_tokens: int, max_context: int) -> EngineConfig:
    """One page that holds a whole request: a slot, dealt for as long as the request lives."""
    return EngineConfig(
        kv_pool_bytes=budget.pool_bytes(budget.slot_tokens),
        tokens_per_page=budget.slot_tokens,
        max_requests=min(max_requests, budget.slots),
        max_step_tokens=max_step_tokens,
        max_context=max_context,
        prefix_cache=False,
    )


def require_passes(passes: int) -> None:
    """Raises BenchmarkError below one pass."""
    if passes < 1:
        raise BenchmarkError(f"{passes} passes measure nothing: give at least 1")


def require_fit(workload: Workload, spec: ModelSpec) -> None:
    """Raises BenchmarkError for a request that is longer than the model's context or in another vocabulary."""
    if workload.longest_context > spec.max_context:
        raise BenchmarkError(
            f"the longest request has {workload.longest_context} tokens with its answer and {spec.name} was made for "
            f"{spec.max_context}: give shorter requests, or another model"
        )
    largest = max(max(request.prompt) for request in (*workload.requests, *workload.primer))
    if largest >= spec.vocab_size:
        raise BenchmarkError(
            f"token id {largest} of the trace is outside the vocabulary of {spec.vocab_size} of {spec.name}: "
            "give a trace made for this model"
        )


def open_benchmark_model(source: str | None, *, tiny: bool, console: Console) -> LoadedModel:
    """The model named, the default, or a random one of two small layers. Raises BenchmarkError, or as `load_model`."""
    if tiny:
        if source is not None:
            raise BenchmarkError(f"--tiny brings its own random model: leave out {source}, or leave out --tiny")
        with tempfile.TemporaryDirectory() as folder:
            return load_model(write_random_llama(Path(folder) / "tiny-random-llama", layers=2))
    if source is None and not DEFAULT_MODEL.is_file():
        raise BenchmarkError(f"{DEFAULT_MODEL} is missing: run 'make model', name a model, or try --tiny")
    return open_model(source or str(DEFAULT_MODEL), "float32", console)


def start_arms(model: LoadedModel, configs: Mapping[str, EngineConfig], console: Console) -> list[Arm]:
    """Engines with every shape that they can reach compiled. Raises what `PagedEngine` raises."""
    arms = []
    for name, config in configs.items():
        arms.append(Arm(name, start_engine(model, config, console, warm_up=True)))
        plan = arms[-1].engine.describe()
        console.print(
            f"{name}: {plan.layout.usable_pages} pages of {plan.layout.tokens_per_page} tokens, at most "
            f"{config.max_requests} requests at once, {len(plan.shapes)} shapes compiled, {plan.provider} kernels"
        )
    return arms


def alternate(
    arms: Sequence[Arm],
    workload: Workload,
    passes: int,
    console: Console,
    describe: Callable[[Replay], str],
) -> dict[str, list[Replay]]:
    """Replay `workload` on every arm, once to be discarded and `passes` times to be kept; by the arm's name.

    `describe` says in a few words how a pass went. Raises what `Batcher.submit` raises.
    """
    kept: dict[str, list[Replay]] = {arm.name: [] for arm in arms}
    for number in range(passes + 1):
        for arm in arms if number % 2 == 0 else reversed(arms):
            result = _one_pass(arm, workload, console)
            label = f"pass {number} of {passes}" if number else "discarded pass"
            console.print(f"{label}, {arm.name}: {describe(result)}")
            if number:
                kept[arm.name].append(result)
    return kept


def _one_pass(arm: Arm, workload: Workload, console: Console) -> Replay:
    arm.engine.reset_prefix_cache()
    if workload.primer:
        replay(arm.engine, workload.primer)
    columns = (TextColumn(arm.name), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(workload.requests))
        return replay(arm.engine, workload.requests, on_progress=lambda ended: bar.update(task, completed=ended))


def report_bugs(results: Mapping[str, Sequence[Replay]], console: Console) -> bool:
    """Say what may not have happened in a measured pass; whether it did."""
    found = False
    for name, passes in results.items():
        for what in ("leaked_pages", "traces", "compilations"):
            worst = max(getattr(result.counts, what) for result in passes)
            if worst:
                console.print(f"{name}: {worst} {what.replace('_', ' ')} in a measured pass, where none may be: a bug")
                found = True
    return found


def progress_console() -> Console:
    """Where progress goes: stderr, so that stdout holds results alone."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)
