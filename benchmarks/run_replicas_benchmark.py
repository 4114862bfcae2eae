"""What replicas cost and what affinity is worth: one server, two replicas, and two that are chosen by load alone.

Each is a process of its own, started in turn and asked the same: requests of one token and short streams, one after
another, and prompts that share prefixes, from several clients. Each pass has prefixes of its own, so that nothing of
them is cached when it begins.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arms import add_run_options, open_benchmark_model, progress_console, require_passes
from latency import percentile
from measures import Measure, Measures, figures_of
from reporting import print_figure
from tables import print_table

from kv_common.errors import JaxkvError
from kv_execution import EngineConfig

HERE = Path(__file__).resolve().parent
ARMS = ("server", "replicas", "by_load")
BY_LOAD = -1
"""How much busier a replica may be that has a prompt cached, where no replica is preferred for that."""
GROUPS = {"latency": ["tiny_p50", "tiny_p99", "stream_p50", "stream_p99"], "prefixes": ["cached_share", "prefix_p50"]}
IDS = range(10, 200)
SUFFIX_TOKENS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for a bad request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_run_options(parser)
    parser.add_argument("--requests", type=int, default=100, help="of one token, and of a stream (default 100)")
    parser.add_argument("--output-tokens", type=int, default=32, help="of a stream (default 32)")
    parser.add_argument("--prefixes", type=int, default=12, help="that prompts share (default 12)")
    parser.add_argument("--prefix-tokens", type=int, default=128, help="of each (default 128)")
    parser.add_argument("--turns", type=int, default=4, help="prompts with one prefix (default 4)")
    parser.add_argument("--clients", type=int, default=4, help="at once, for those (default 4)")
    parser.add_argument("--serve", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.serve:
            serve(options.serve, options.model, options.port, options.prefix_tokens + options.output_tokens + 64)
        else:
            run(options)
    except JaxkvError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Measure and report. Raises JaxkvError where a server does not start or refuses a request."""
    require_passes(options.passes)
    console = progress_console()
    workload = {name: value for name, value in vars(options).items() if name not in ("serve", "port")}
    columns = {}
    for arm in ARMS:
        with started(arm, options) as port:
            passes = [measure(port, options, index) for index in range(options.passes + 1)][1:]
        columns[arm] = figures_of(f"replicas.{arm}", passes, workload=workload, dtype="float32")
        console.print(f"{arm}: {passes[-1]['tiny_p50'].value * 1e3:.1f} ms for one token")
    if options.json:
        for figures in columns.values():
            for figure in figures.values():
                print_figure(figure)
    else:
        print_table("What replicas cost, and what affinity is worth", columns, GROUPS, console)


def measure(port: int, options: argparse.Namespace, index: int) -> Measures:
    """One pass."""
    tiny = {"prompt": [IDS[0]], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    stream = {**tiny, "max_tokens": options.output_tokens, "stream": True}
    measures = {}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as client:
        for name, body in (("tiny", tiny), ("stream", stream)):
            times_s = [ask(client, body)[0] for _ in range(options.requests)]
            for percent in (50, 99):
                measures[f"{name}_p{percent}"] = Measure(percentile(times_s, percent), "s")
    with ThreadPoolExecutor(options.clients) as clients:
        shares = clients.map(lambda prompts: ask_all(port, prompts), shared_prefixes(options, random.Random(index)))
        answers = [answer for share in shares for answer in share]
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in answers)
    asked = sum(answer["usage"]["prompt_tokens"] for _, answer in answers)
    measures["cached_share"] = Measure(cached / asked, "of prompt tokens")
    measures["prefix_p50"] = Measure(percentile([time_s for time_s, _ in answers], 50), "s")
    return measures


def shared_prefixes(options: argparse.Namespace, rng: random.Random) -> list[list[list[int]]]:
    """The prompts of each client, in their order: it has prefixes of its own, and takes turns with them."""
    prefixes = [rng.choices(IDS, k=options.prefix_tokens) for _ in range(options.prefixes)]
    return [
        [
            [*prefix, *rng.choices(IDS, k=SUFFIX_TOKENS)]
            for _ in range(options.turns)
            for prefix in rng.sample(mine, len(mine))
        ]
        for mine in (prefixes[client :: options.clients] for client in range(options.clients))
    ]


def ask_all(port: int, prompts: Sequence[list[int]]) -> list[tuple[float, dict[str, Any]]]:
    """Seconds and answers of a client's prompts, one after another."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as client:
        return [
            ask(client, {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}) for prompt in prompts
        ]


def ask(client: http.client.HTTPConnection, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds to the end of the answer, and the answer where it is no stream. Raises JaxkvError for any but a 200."""
    started_s = time.perf_counter()
    client.request("POST", "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    response = client.getresponse()
    content = response.read()
    duration_s = time.perf_counter() - started_s
    if response.status != 200:
        raise JaxkvError(f"a request was answered with {response.status}: {content[:200]!r}")
    return duration_s, {} if body.get("stream") else json.loads(content)


@contextlib.contextmanager
def started(arm: str, options: argparse.Namespace) -> Iterator[int]:
    """The port of an arm's server, which is ready. Raises JaxkvError where it does not become so."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", arm, "--port", str(port)]
    command += [f"--prefix-tokens={options.prefix_tokens}", f"--output-tokens={options.output_tokens}"]
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command + ([options.model] if options.model else []),
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_ready(port, process)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_until_ready(port: int, process: subprocess.Popen[bytes], timeout_s: float = 300.0) -> None:
    """Raises JaxkvError where it takes too long, or the process ends."""
    end_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
            client.request("GET", "/ready")
            if client.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise JaxkvError(f"the server on port {port} is not ready: run {Path(__file__).name} --serve to see why")


def serve(arm: str, model: str | None, port: int, max_context: int) -> None:
    """Be the server of an arm until SIGTERM."""
    from kv_serving.server.run import Loaded, ServerSettings
    from kv_serving.server.run import serve as serve_one
    from kv_serving.session import start_engine

    config = EngineConfig(kv_pool_bytes=64 << 20, max_requests=8, max_step_tokens=64, max_context=max_context)

    def load() -> Loaded:
        console = progress_console()
        loaded = open_benchmark_model(model, tiny=False, console=console)
        return Loaded(loaded, start_engine(loaded, config, console, warm_up=True))

    settings = ServerSettings(name="model", port=port)
    if arm == "server":
        serve_one(settings, load)
        return
    from kv_serving.replicas.app import Scaling, run

    affinity = Scaling(replicas=2, max_replicas=2)
    run(settings, load, affinity if arm == "replicas" else Scaling(replicas=2, max_replicas=2, most_behind=BY_LOAD))


if __name__ == "__main__":
    sys.exit(main())
