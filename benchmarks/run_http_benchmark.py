"""What the server costs: tokens a second through HTTP streams against the engine alone, on one trace in one run.

Both arms use the same engine, in turn, with an empty prefix cache: once with all prompts handed to it at once, and once
behind the server, with as many clients as it runs requests, each with one stream after another. The clients are a
process of their own. The answers of both arms have to be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arms import add_run_options, open_benchmark_model, progress_console, require_passes
from latency import percentile
from measures import Measure, Measures, figures_of, ratios
from reporting import print_figure
from tables import print_table
from workloads import Lengths, Workload, closed_batch

from kv_common.errors import JaxkvError
from kv_execution import EngineConfig, PagedEngine, SamplingParams
from kv_serving.server.limits import Limits
from kv_serving.server.run import Loaded, RunningServer, ServerSettings, serve
from kv_serving.session import start_engine, tokenizer_of
from models import LoadedModel

GROUPS = {"throughput": ["output_throughput"], "latency": ["first_p50", "first_p99", "gap_p50", "gap_p99"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 where the server changed an answer, 2 for a bad request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_run_options(parser)
    parser.add_argument("--clients", type=int, default=32, help="streams at once (default 32)")
    parser.add_argument("--requests", type=int, default=64, help="of the trace (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each request (default 64)")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each request (default 64)")
    parser.add_argument("--max-step-tokens", type=int, default=256, help="token budget of a step (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="of the trace (default 0)")
    try:
        return run(parser.parse_args(arguments))
    except JaxkvError as error:
        print(error, file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Measure and report. Raises JaxkvError for whatever the options ask that cannot be."""
    console = progress_console()
    require_passes(options.passes)
    model = open_benchmark_model(options.model, tiny=False, console=console)
    lengths = Lengths(options.prompt_tokens, options.output_tokens)
    trace = closed_batch(options.requests, lengths, vocab_size=tokenizer_of(model).vocab_size, seed=options.seed)
    config = EngineConfig(
        kv_pool_bytes=512 << 20,
        max_requests=options.clients,
        max_step_tokens=max(options.max_step_tokens, options.clients),
        max_context=trace.longest_context + 1,
    )
    engine = start_engine(model, config, console, warm_up=True)
    alone, served, same = [], [], True
    with started(model, engine, options.clients) as server:
        for index in range(options.passes + 1):
            expected, alone_measures = run_alone(model, engine, trace)
            texts, served_measures = run_served(server.url, engine, trace, options.clients)
            same = same and texts == expected
            console.print(
                f"pass {index}: {alone_measures['output_throughput'].value:.1f} tokens/s alone, "
                f"{served_measures['output_throughput'].value:.1f} through HTTP"
            )
            if index:
                alone.append(alone_measures)
                served.append(served_measures)
    described = {**vars(options), "model": model.spec.name, "same_answers": same}
    columns = {
        heading: figures_of(f"http.{heading}", passes, workload=described, dtype=model.spec.dtype)
        for heading, passes in (
            ("alone", alone),
            ("served", served),
            ("ratio", ratios(served, alone, ["output_throughput"])),
        )
    }
    if options.json:
        for figures in columns.values():
            for figure in figures.values():
                print_figure(figure)
    else:
        print_table("What the server costs", columns, GROUPS, progress_console())
    if not same:
        print("the server changed an answer", file=sys.stderr)
    return 0 if same else 1


@contextlib.contextmanager
def started(model: LoadedModel, engine: PagedEngine, clients: int) -> Iterator[RunningServer]:
    """A server over `engine`, in a thread that ends with it."""
    listening: queue.Queue[RunningServer] = queue.Queue()
    settings = ServerSettings(name="model", port=0, limits=Limits(max_concurrent=2 * clients))
    thread = threading.Thread(target=serve, args=(settings, lambda: Loaded(model, engine), listening.put), daemon=True)
    thread.start()
    server = listening.get(timeout=300)
    try:
        while server.context.readiness != "ready":
            time.sleep(0.01)
        yield server
    finally:
        server.drain()
        thread.join()


def run_alone(model: LoadedModel, engine: PagedEngine, trace: Workload) -> tuple[list[str], Measures]:
    """Texts of the trace from the engine, and how long it took, with the text being made of the tokens."""
    engine.reset_prefix_cache()
    params = [SamplingParams(max_tokens=request.max_tokens, ignore_eos=True) for request in trace.requests]
    started_s = time.perf_counter()
    results = engine.generate([request.prompt for request in trace.requests], params)
    duration_s = time.perf_counter() - started_s
    tokenizer = tokenizer_of(model)
    texts = [tokenizer.decode([id for id in result.tokens if id < tokenizer.vocab_size]) for result in results]
    return texts, {"output_throughput": Measure(_tokens(trace) / duration_s, "tokens/s")}


def run_served(url: str, engine: PagedEngine, trace: Workload, clients: int) -> tuple[list[str], Measures]:
    """Texts of the trace from the server, and how long it took."""
    engine.reset_prefix_cache()
    bodies: list[dict[str, Any]] = [
        {"prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True}
        for request in trace.requests
    ]
    child = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "http_clients.py")],
        input=json.dumps({"url": url, "clients": clients, "bodies": bodies}),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise JaxkvError(f"the clients failed: {child.stderr.strip()[-300:]}")
    answer = json.loads(child.stdout)
    measures = {"output_throughput": Measure(_tokens(trace) / answer["duration_s"], "tokens/s")}
    for name in ("first", "gap"):
        for percent in (50, 99):
            measures[f"{name}_p{percent}"] = Measure(percentile(answer[f"{name}_s"], percent), "s")
    return answer["texts"], measures


def _tokens(trace: Workload) -> int:
    return sum(request.max_tokens for request in trace.requests)


if __name__ == "__main__":
    sys.exit(main())
