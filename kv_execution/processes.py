"""Several processes as one program: how they meet, agree, and end together.

Contract: the control plane runs in every process, replicated. Each submits the same requests in the same order, and
plans by counters and never by clocks or chance, so all of them dispatch the same steps and no page table travels; a
process that only followed would need one broadcast per step, before its device could begin. What is not deterministic
is agreed: seeds that nobody chose, and the clock of deadlines (process 0's).

The processes meet at process 0 before jax does, because jax ends a process that waits in vain, or that loses a peer,
with a stack trace. The sockets stay open as lifelines: a peer that dies, or is silent for `timeout_s`, ends the others
with one line. Where process 0 dies jax's service dies with it, and jax may be the first to say so and end a process.
"""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from kv_common import __version__
from kv_common.errors import JaxkvError
from kv_kernels.tensor_parallel import TensorMesh

EXIT_STATUS = 2
"""Of a process that its peers have left."""

MAX_HELLO_BYTES = 4096
HELLO_S = 5.0
"""For a connection to say who it is, so that a stranger does not keep the peers waiting."""

BEATS_PER_TIMEOUT = 4
_BEAT, _GOODBYE = b".", b"q"


class ProcessGroupError(JaxkvError):
    """The processes cannot meet: an address, a number, or a peer that does not come."""


class PeerLostError(JaxkvError):
    """A peer ended, or cannot be reached, while it was needed."""


class ProcessGroup:
    """The peers of this process, and the lifelines to them: process 0 has one to each, the others one to process 0."""

    def __init__(self, process_id: int, lifelines: dict[int, socket.socket], timeout_s: float) -> None:
        self.process_id = process_id
        self._lifelines = lifelines
        self._timeout_s = timeout_s
        self._left = threading.Event()
        self._reporting = threading.Lock()
        for peer, line in lifelines.items():
            threading.Thread(target=self._watch, args=(peer, line), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def leave(self) -> None:
        """Say goodbye: from now on no peer is missed, nor misses this one."""
        if not self._left.is_set():
            self._left.set()
            for line in self._lifelines.values():
                with contextlib.suppress(OSError):
                    line.sendall(_GOODBYE)

    def end(self, message: str) -> NoReturn:
        """End this process with one line, whoever of several threads is first to notice that a peer is lost."""
        with self._reporting:
            print(f"jaxkv: {message}", file=sys.stderr, flush=True)
            # Not sys.exit: jax would wait for the peer at the door, and the main thread may be waiting for it already.
            os._exit(EXIT_STATUS)

    def _watch(self, peer: int, line: socket.socket) -> None:
        line.settimeout(self._timeout_s)
        try:
            while received := line.recv(64):
                if _GOODBYE in received:
                    return
            reason = "has ended"
        except TimeoutError:
            reason = f"has not been heard of for {self._timeout_s:g} s"
        except OSError as error:
            reason = f"cannot be reached ({error.strerror})"
        if not self._left.is_set():
            self.end(
                f"process {peer} {reason}, and process {self.process_id} cannot go on alone: start all of them again"
            )

    def _beat(self) -> None:
        while not self._left.wait(self._timeout_s / BEATS_PER_TIMEOUT):
            for line in self._lifelines.values():
                with contextlib.suppress(OSError):  # the watcher of that line will say so
                    line.sendall(_BEAT)


def join_processes(coordinator: str, num_processes: int, process_id: int, *, timeout_s: float = 60) -> ProcessGroup:
    """Meet the other processes at `coordinator` (HOST:PORT, of process 0); before jax is used for anything.

    `timeout_s`: how long to wait for peers to come, and then to be silent.

    Raises:
        ProcessGroupError: bad numbers, an address that cannot be used, a peer that does not come or does not match.
    """
    host, separator, port = coordinator.rpartition(":")
    if not (host and separator and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ProcessGroupError(f"the coordinator is {coordinator!r}; give HOST:PORT of process 0")
    if num_processes < 2 or not 0 <= process_id < num_processes:
        raise ProcessGroupError(
            f"process {process_id} of {num_processes} cannot be: give at least 2 processes, and ids from 0 to one less"
        )
    address = (host.strip("[]"), int(port))
    hello = {"jaxkv": __version__, "processes": num_processes, "id": process_id}
    deadline_s = time.monotonic() + timeout_s
    lifelines, service = (_receive if process_id == 0 else _call)(address, hello, deadline_s)
    jax.distributed.initialize(
        service,
        num_processes,
        process_id,
        initialization_timeout=max(1, round(timeout_s)),
        cluster_detection_method="deactivate",
        # Behind the lifelines, which say what happened in one line.
        heartbeat_timeout_seconds=round(2 * timeout_s + 10),
        shutdown_timeout_seconds=max(1, round(timeout_s)),
        coordinator_bind_address=service,
    )
    return ProcessGroup(process_id, lifelines, timeout_s)


def _receive(
    address: tuple[str, int], hello: dict[str, Any], deadline_s: float
) -> tuple[dict[int, socket.socket], str]:
    """Process 0: wait for every peer, then tell all where jax's service will be."""
    peers: dict[int, socket.socket] = {}
    wanted = hello["processes"] - 1
    with contextlib.ExitStack() as undo:
        try:
            server = undo.enter_context(socket.create_server(address, backlog=wanted))
        except OSError as error:
            raise ProcessGroupError(
                f"process 0 cannot listen at {address[0]}:{address[1]} ({error.strerror}): choose another address or "
                "port"
            ) from error
        while len(peers) < wanted:
            line = undo.enter_context(
                _accept(server, deadline_s, f"{len(peers) + 1} of {wanted + 1} processes have come")
            )
            said = _read_line(line, min(deadline_s, time.monotonic() + HELLO_S))
            if said is None:  # somebody else's connection
                line.close()
                continue
            problem = _mismatch(said, hello, peers)
            if problem:
                _write_line(line, {"refused": problem})
                raise ProcessGroupError(problem)
            peers[said["id"]] = line
        with socket.create_server((address[0], 0)) as free:
            service = f"{address[0]}:{free.getsockname()[1]}"
        for line in peers.values():
            _write_line(line, {"service": service})
        undo.pop_all()
        server.close()
    return peers, service


def _accept(server: socket.socket, deadline_s: float, so_far: str) -> socket.socket:
    server.settimeout(max(0.01, deadline_s - time.monotonic()))
    try:
        return server.accept()[0]
    except TimeoutError as error:
        raise ProcessGroupError(
            f"{so_far} in the time there was: start the others sooner, or check their coordinator address"
        ) from error


def _mismatch(said: dict[str, Any], hello: dict[str, Any], peers: dict[int, socket.socket]) -> str | None:
    """What is wrong with a peer's hello."""
    if said.get("jaxkv") != hello["jaxkv"]:
        return f"process 0 runs jaxkv {hello['jaxkv']} and a peer {said.get('jaxkv')}: install one version everywhere"
    if said.get("processes") != hello["processes"]:
        return (
            f"process 0 was told of {hello['processes']} processes and a peer of {said.get('processes')}: give all the "
            "same number"
        )
    if said.get("id") not in range(1, hello["processes"]) or said["id"] in peers:
        return f"process id {said.get('id')} came twice or is none: give every process its own"
    return None


def _call(address: tuple[str, int], hello: dict[str, Any], deadline_s: float) -> tuple[dict[int, socket.socket], str]:
    """Any other process: find process 0, and hear from it where jax's service will be."""
    while True:
        try:
            line = socket.create_connection(address, timeout=max(0.01, deadline_s - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() > deadline_s or isinstance(error, socket.gaierror):
                raise ProcessGroupError(
                    f"process {hello['id']} cannot reach process 0 at {address[0]}:{address[1]} "
                    f"({error.strerror or error}): start it, or check the coordinator address"
                ) from error
            time.sleep(0.05)
    with contextlib.ExitStack() as undo:
        undo.enter_context(line)
        _write_line(line, hello)
        answer = _read_line(line, deadline_s) or {"refused": "process 0 did not answer: see what it says"}
        if "refused" in answer:
            raise ProcessGroupError(str(answer["refused"]))
        undo.pop_all()
    return {0: line}, str(answer["service"])


def _write_line(line: socket.socket, said: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever listens no more will be missed soon enough
        line.sendall(json.dumps(said).encode() + b"\n")


def _read_line(line: socket.socket, deadline_s: float) -> dict[str, Any] | None:
    """One line of JSON, or None where something else comes, or nothing."""
    received = b""
    with contextlib.suppress(OSError, ValueError):
        while not received.endswith(b"\n") and len(received) < MAX_HELLO_BYTES:
            line.settimeout(max(0.01, deadline_s - time.monotonic()))
            if not (part := line.recv(1)):
                return None
            received += part
        said = json.loads(received)
        return said if isinstance(said, dict) else None
    return None


def agreed_clock(clock: Callable[[], float], mesh: TensorMesh | None) -> Callable[[], float]:
    """`clock`, or process 0's reading of it where several processes have to see the same time.

    A reading then waits for the step in flight; it is taken only while some request has a deadline.
    """
    if mesh is None or mesh.num_processes == 1:
        return clock
    return lambda: float(np.frombuffer(_from_process_0(np.float64(clock()).tobytes()), np.float64)[0])


def seed_source(mesh: TensorMesh | None) -> Callable[[], int]:
    """Draws 63-bit seeds for requests that came without one; the same in every process of a mesh."""
    if mesh is None or mesh.num_processes == 1:
        return lambda: secrets.randbits(63)
    seeds = _agreed_seeds()
    return lambda: next(seeds)


def _agreed_seeds() -> Iterator[int]:
    root = _from_process_0(secrets.token_bytes(32))
    number = 0
    while True:
        yield (
            int.from_bytes(hashlib.blake2b(root + number.to_bytes(8, "little"), digest_size=8).digest(), "little") >> 1
        )
        number += 1


def _from_process_0(message: bytes) -> bytes:
    """Process 0's `message`, everywhere; all processes must call it at the same point."""
    return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(message, np.uint8))).tobytes()
