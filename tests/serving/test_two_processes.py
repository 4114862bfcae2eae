"""Two real processes on this machine generate as one, and neither outlives the other by more than its timeout."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from patience import HANG_S, reserved_port

from kv_execution.process_group import EXIT_STATUS
from kv_serving.cli import run
from tests.models.model_files import write_gguf

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROMPT = ("--prompt", "an an 1 2", "--raw", "--temperature", "0")
SMALL = ("--kv-pool-bytes", "1MiB")


MAIN = "from kv_serving.cli import main; main()"
STOPPED = """
import pkgutil, sys, time
from kv_serving.cli import main
import kv_execution, os

def stop(*_, **__):
    print("stopped", file=sys.stderr, flush=True)
    time.sleep(3600)

if os.environ.get("JAXKV_PROCESS_ID", "0") == "{process_id}":
    owner, name = "{where}".rsplit(".", 1)
    setattr(pkgutil.resolve_name(owner), name, stop)
main()
"""
HELD = """
import itertools, time
from kv_serving.cli import main
from kv_execution.runtime import PagedRuntime
import os

forward, steps = PagedRuntime.forward, itertools.count()

def held(self, *arguments):
    if next(steps) == 20:
        time.sleep(3600)
    return forward(self, *arguments)

if os.environ.get("JAXKV_PROCESS_ID", "0") == "{process_id}":
    PagedRuntime.forward = held
main()
"""
FAILS = """
from kv_serving.cli import main
from kv_execution.runtime import PagedRuntime
import os

def fail(*_):
    raise ZeroDivisionError("a mistake")

if "JAXKV_PROCESS_ID" not in os.environ:
    PagedRuntime.forward = fail
main()
"""


LATE = """
import os, pkgutil, time
from kv_serving.cli import main
import kv_execution

owner, name = "{where}".rsplit(".", 1)
on_time = getattr(pkgutil.resolve_name(owner), name)

def late(*arguments, **options):
    setattr(pkgutil.resolve_name(owner), name, on_time)
    time.sleep(35)
    return on_time(*arguments, **options)

if "JAXKV_PROCESS_ID" in os.environ:
    setattr(pkgutil.resolve_name(owner), name, late)
main()
"""


class Pair(NamedTuple):
    """Processes 0 and 1 of one command."""

    first: subprocess.Popen
    second: subprocess.Popen


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_gguf(REPOSITORY / "tests" / "data" / "golden" / "llama", tmp_path_factory.mktemp("pair") / "tiny.gguf")


@contextlib.contextmanager
def pair(model: Path, *options: str, tp: int = 2, peer_timeout_s: float = HANG_S, main: str = MAIN) -> Iterator[Pair]:
    """The same command twice; the first is told its part by options, the second by the environment."""
    command = [sys.executable, "-c", main, "generate", str(model)]
    command += [*PROMPT, *SMALL, *options, "--tp", str(tp), "--peer-timeout", str(peer_timeout_s)]
    reserved = contextlib.ExitStack()
    coordinator = f"127.0.0.1:{reserved.enter_context(reserved_port())}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={max(1, tp // 2)}"
    by_options = ("--coordinator", coordinator, "--num-processes", "2", "--process-id", "0")
    by_environment = {"JAXKV_COORDINATOR": coordinator, "JAXKV_NUM_PROCESSES": "2", "JAXKV_PROCESS_ID": "1"}
    started = []
    try:
        for given, variables in ((by_options, {}), ((), by_environment)):
            environment = {**os.environ, **variables, "XLA_FLAGS": flags}
            started.append(
                subprocess.Popen(
                    [*command, *given],
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        yield Pair(*started)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        reserved.close()


def assert_misses(process: subprocess.Popen, complaints: bytes, killed: int) -> None:
    """`process` has ended with the line about a peer that was killed, and with nothing else."""
    assert complaints.decode() == (
        f"jaxkv: process {killed} has ended, and process {1 - killed} cannot go on alone: start all of them again\n"
    )
    assert process.returncode == EXIT_STATUS


def test_two_processes_generate_the_tokens_of_one_and_the_first_alone_speaks(model, capsys):
    options = ("--max-tokens", "24", "--json")
    with pair(model, *options) as (first, second):
        out, complaints = first.communicate(timeout=HANG_S)
        silence, also_nothing = second.communicate(timeout=HANG_S)
    assert (first.returncode, second.returncode) == (0, 0), (complaints, also_nothing)
    assert (silence, also_nothing) == (b"", b"")
    assert run(["generate", str(model), *PROMPT, *SMALL, *options]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert json.loads(out)["results"] == alone["results"]
    assert len(alone["results"][0]["tokens"]) > 8


@pytest.mark.parametrize(
    ("killed", "how"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_other_with_one_line(killed, how, model):
    with pair(model, "--max-tokens", "200", main=HELD.format(process_id=killed)) as processes:
        assert processes.first.stdout.read(1), processes.first.stderr.read()  # tokens are coming
        processes[killed].send_signal(how)
        _, complaints = processes[1 - killed].communicate(timeout=HANG_S)
    assert_misses(processes[1 - killed], complaints, killed)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize(
    "where",
    [
        "jax.distributed.initialize",
        "kv_serving.cli.open_model",
        "kv_serving.cli.start_engine",
        "kv_execution.runtime.PagedRuntime.forward",
        "kv_execution.runtime.PagedRuntime.collect",
        "kv_serving.process_options.leave",
    ],
)
def test_wherever_a_process_is_killed_the_other_ends_with_one_line(where, killed, model):
    with pair(model, "--json", main=STOPPED.format(where=where, process_id=killed)) as processes:
        while (line := processes[killed].stderr.readline()) != b"stopped\n":
            assert line, "it has ended before it came there"
        with pytest.raises(subprocess.TimeoutExpired):
            processes[1 - killed].communicate(timeout=1)  # it waits
        processes[killed].kill()
        answer, complaints = processes[1 - killed].communicate(timeout=HANG_S)
    assert_misses(processes[1 - killed], complaints, killed)
    assert bool(answer) == (killed == 1 and where.endswith(".leave")), "an answer that is complete is not lost"


@pytest.mark.slow
def test_a_process_that_fails_on_its_own_shows_its_traceback_and_ends_the_other_with_one_line(model):
    with pair(model, main=FAILS) as (first, second):
        _, complaints = first.communicate(timeout=HANG_S)
        _, others_complaints = second.communicate(timeout=HANG_S)
    assert first.returncode == 1
    assert complaints.splitlines()[-1] == b"ZeroDivisionError: a mistake"
    assert_misses(second, others_complaints, 0)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_peer_that_falls_silent_ends_the_other_within_its_timeout(stopped, model):
    # Long enough for both to come, and to be heard of while they start on a busy machine; jax itself would wait longer.
    with pair(model, "--max-tokens", "200", peer_timeout_s=30, main=HELD.format(process_id=stopped)) as processes:
        assert processes.first.stdout.read(1), processes.first.stderr.read()
        processes[stopped].send_signal(signal.SIGSTOP)
        _, complaints = processes[1 - stopped].communicate(timeout=HANG_S)
    assert complaints.decode().splitlines() == [
        f"jaxkv: process {stopped} has not been heard of for 30 s, and process {1 - stopped} cannot go on alone: start "
        "all of them again"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["kv_serving.cli.start_engine", "kv_execution.runtime.PagedRuntime.forward"])
def test_a_process_that_needs_longer_than_gloo_waits_for_a_first_collective_is_waited_for(where, model):
    with pair(model, "--max-tokens", "4", tp=4, main=LATE.format(where=where)) as (first, second):
        answer, complaints = first.communicate(timeout=HANG_S)
        second.communicate(timeout=HANG_S)
    assert (first.returncode, second.returncode) == (0, 0), complaints
    assert answer


@pytest.mark.slow
def test_four_devices_in_two_processes_share_two_heads(model, capsys):
    options = ("--max-tokens", "24", "--json")
    with pair(model, *options, tp=4) as (first, second):
        out, complaints = first.communicate(timeout=HANG_S)
        second.communicate(timeout=HANG_S)
    assert first.returncode == 0, complaints
    assert run(["generate", str(model), *PROMPT, *SMALL, *options]) == 0
    assert json.loads(out)["results"] == json.loads(capsys.readouterr().out)["results"]


def test_one_process_with_many_devices_says_what_one_device_says(model, capsys):
    results = []
    for tp in ("1", "2"):
        assert run(["generate", str(model), *PROMPT, *SMALL, "--max-tokens", "24", "--json", "--tp", tp]) == 0
        results.append(json.loads(capsys.readouterr().out)["results"])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--coordinator", "h:1"), "several processes need --coordinator, --num-processes and --process-id"),
        (("--coordinator", "h:1", "--num-processes", "2", "--process-id", "0"), "with --tp 1 each of 2 processes"),
        (("--coordinator", "h:1", "--num-processes", "1", "--process-id", "0"), "one process meets nobody"),
        (("--tp", "0"), "Invalid value for '--tp'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, model, capsys):
    assert run(["generate", str(model), *PROMPT, *options]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


APART = """
import sys, time, itertools
from kv_execution import EngineConfig, PagedEngine, SamplingParams, join_processes
from models import load_model

coordinator, process_id, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
group = join_processes(coordinator, 2, process_id, timeout_s=300)
readings = itertools.count(process_id * 1000, 3)  # their clocks differ, and this one is also fast
engine = PagedEngine(
    load_model(model, tensor_parallel=2),
    EngineConfig(max_requests=2, max_step_tokens=16, max_context=64, kv_pool_bytes=1 << 20),
    clock=lambda: float(next(readings)),
)
engine.init_paged_runtime()
batcher = engine.batcher()
params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)  # and no seed
ids = [batcher.submit([5, 6, 7], params, deadline_s=deadline_s) for deadline_s in (None, 40, None)]
while batcher.has_unfinished:
    for output in batcher.step():
        print(ids.index(output.request_id), output.token, output.finish_reason)
group.leave()
"""


READS = """
import json, sys
from pathlib import Path
import numpy as np
from kv_execution import join_processes
from models import load_model
from models.gguf_loader import GgufCheckpoint

coordinator, process_id, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
group = join_processes(coordinator, 2, process_id, timeout_s=300)
read, numbers = GgufCheckpoint.read, {}

def counted(self, name, index=None):
    tensor = read(self, name, index)
    numbers[name] = numbers.get(name, 0) + tensor.size
    return tensor

GgufCheckpoint.read = counted
fingerprint = load_model(model, tensor_parallel=2).fingerprint
checkpoint = GgufCheckpoint(Path(model))
shares = {name: numbers[name] / np.prod(checkpoint.shape(name)) for name in checkpoint.names}
print(json.dumps({"shares": shares, "fingerprint": str(fingerprint)}))
group.leave()
"""


def run_in_two_processes(script: str, model: Path) -> list[list[str]]:
    """The lines that each process of `script` prints, Gloo's apart."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": flags}
    with reserved_port() as port:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", script, f"127.0.0.1:{port}", str(process_id), str(model)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for process_id in (0, 1)
        ]
        outputs = [process.communicate(timeout=HANG_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return [[line for line in out.decode().splitlines() if "Gloo" not in line] for out, _ in outputs]


def test_a_process_reads_its_own_slices_and_no_others(model):
    first, second = (json.loads(line) for (line,) in run_in_two_processes(READS, model))
    assert first == second
    whole = {name for name, share in first["shares"].items() if share == 1}
    assert {share for share in first["shares"].values()} == {0.5, 1}
    assert {name.split(".")[-2] for name in whole} == {"token_embd", "attn_norm", "ffn_norm", "output_norm"}


@pytest.mark.slow
def test_seeds_that_nobody_chose_and_deadlines_are_agreed(model):
    told = run_in_two_processes(APART, model)
    assert told[0] == told[1]
    assert told[0][-1].endswith("length")
    assert any(line.startswith("1 ") and line.endswith("deadline") for line in told[0]), told[0]
    assert len({tuple(line.split()[1] for line in told[0] if line.startswith(first)) for first in "02"}) == 2
