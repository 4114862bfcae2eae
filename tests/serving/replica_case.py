"""`jaxkv serve --replicas` in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil
from patience import HANG_S, reserved_port, wait_for

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
# Ray gives up where an answer of its own parts takes longer, as it may while all of them start on a busy machine.
ENVIRONMENT |= dict.fromkeys(
    (
        "RAY_gcs_server_request_timeout_seconds",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S",
    ),
    f"{HANG_S:.0f}",
)
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
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        command = [sys.executable, "-c", START, "serve", str(model), f"--port={port}", *options.split()]
        output = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command, env=ENVIRONMENT | dict(environment or {}), cwd=REPOSITORY, stdout=output, stderr=output
        )
        http = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S, trust_env=False, headers=headers)
        )

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return http.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for(ready)
            yield http, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(HANG_S)
    assert process.returncode == 0
