"""An engine in a process of its own: its threads and its memory are no other's, and its end is not ours.

JSON lines on its standard input and output: requests in, token times out. Whatever a library prints goes to standard
error, which is shown where the process dies. One that cannot start says why in a line, and is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers import Peer, PeerError, Timeline
from workloads import TraceRequest, Workload

from kv_common.errors import JaxkvError

LAST_WORDS = 300
"""Characters of standard error that are shown of a process that died."""


def serve(make: Callable[[Workload | None], Peer], *, once: bool) -> None:
    """Answer requests until the input ends; with `once`, read the first before the engine is made, for its sake."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    first = _workload(json.loads(sys.stdin.readline())) if once else None
    try:
        peer = make(first)
    except ImportError as error:
        say({"skipped": f"{error.name or error} is not installed"})
        return
    except JaxkvError as error:
        say({"skipped": str(error)})
        return
    if first is not None:
        say({**_answer(peer.run(first)), "about": peer.about})
        return
    say({"about": peer.about})
    for line in sys.stdin:
        say(_answer(peer.run(_workload(json.loads(line)))))


def _answer(timeline: Timeline) -> dict[str, Any]:
    return {**timeline._asdict(), "peak_resident_bytes": peak_resident_bytes()}


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident.

    From /proc where there is one: what `getrusage` says begins with what the parent had when it forked.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _workload(lists: Mapping[str, Any]) -> Workload:
    requests, primer = (
        tuple(TraceRequest(0.0, tuple(prompt), tokens) for prompt, tokens in lists[key])
        for key in ("requests", "primer")
    )
    return Workload(requests, primer)


class PeerProcess:
    """The other end of `serve`. Ends its process when it is closed."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started

    def about(self) -> dict[str, Any]:
        """What the engine says of itself once it is ready. Raises PeerError where it cannot start."""
        return self._read()["about"]

    def run(self, workload: Workload) -> dict[str, Any]:
        """`token_s`, `first_tokens` and `peak_resident_bytes`. Raises PeerError where the process has ended."""
        lists = {
            "requests": [(request.prompt, request.max_tokens) for request in workload.requests],
            "primer": [(request.prompt, request.max_tokens) for request in workload.primer],
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # why it ended is in what it said
            print(json.dumps(lists), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process and wait for that."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        answer = json.loads(line)
        if "skipped" in answer:
            raise PeerError(answer["skipped"])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._errors.seek(0)
        words = self._errors.read().strip().splitlines()[-1:] or ["it said nothing"]
        return f"its process ended with {how}: {words[0][-LAST_WORDS:]}"
