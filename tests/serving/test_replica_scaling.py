"""Replicas on two Ray nodes: they come with the load, on the node that has room, and go with it."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from patience import wait_for
from replica_case import ENVIRONMENT, served
from tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent
OPTIONS = (
    "--replicas=1 --max-replicas=2 --target-requests=2 --up-after=1 --down-after=2 --served-name=tiny --drain=2 "
    "--kv-pool-bytes=1MiB --max-requests=2 --max-step-tokens=16 --max-context=128 --no-warm-up --no-compilation-cache"
)


@pytest.fixture
def nodes() -> Iterator[tuple[str, psutil.Process]]:
    """The address of two nodes, and the process whose children they are."""
    command = [sys.executable, str(HERE / "ray_nodes.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield process.stdout.readline().strip(), psutil.Process(process.pid)


def replicas_of(nodes: psutil.Process) -> list[psutil.Process]:
    """The replicas that there are, on whatever node."""
    found = []
    for each in nodes.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ServeReplica:jaxkv:replica" in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_replicas_come_and_go_with_the_load(nodes: tuple[str, psutil.Process], tmp_path: Path) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    seen: dict[str, int] = {}
    enough = threading.Event()
    model, address = write_tiny_model(tmp_path / "tiny"), {"RAY_ADDRESS": nodes[0]}
    with served(model, OPTIONS, tmp_path / "log", environment=address) as (http, _):

        def load() -> None:
            while not enough.is_set():
                response = http.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                seen[response.headers["x-replica"]] = seen.get(response.headers["x-replica"], 0) + 1

        assert len(replicas_of(nodes[1])) == 1
        with ThreadPoolExecutor(8) as clients:
            under_load = [clients.submit(load) for _ in range(8)]
            try:
                wait_for(lambda: len(seen) == 2 and min(seen.values()) > 5)
                both = replicas_of(nodes[1])
            finally:
                enough.set()
            for each in under_load:
                each.result()
        assert len({each.ppid() for each in both}) == 2  # on a node each
        wait_for(lambda: len(replicas_of(nodes[1])) == 1)
        assert http.post("/v1/completions", json=body).status_code == 200
