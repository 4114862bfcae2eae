"""`jaxkv serve --replicas` in a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil
from server_case import wait_for

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
START = "from kv_serving.cli import main; main()"


@contextlib.contextmanager
def served(
    model: Path,
    options: str,
    log: Path,
    *,
    headers: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """A client of replicas that are ready, and their process, which has to end with status 0 at SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, "serve", str(model), f"--port={port}", *options.split()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=ENVIRONMENT | dict(environment or {}), cwd=REPOSITORY, stdout=output, stderr=output
        )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, headers=headers) as http:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return http.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for(ready, 120)
            yield http, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.returncode == 0
