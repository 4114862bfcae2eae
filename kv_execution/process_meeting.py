"""How processes meet: at process 0, before jax does.

Contract: jax ends a process that waits in vain with a stack trace, so that everything that can be wrong with numbers,
addresses and versions is found out here, over plain sockets and in lines of JSON. The sockets are handed on.
"""

import contextlib
import json
import socket
import time
from typing import Any, NamedTuple

from kv_common import __version__
from kv_common.errors import JaxkvError

MAX_HELLO_BYTES = 4096
HELLO_S = 5.0
"""For a connection to say who it is, so that a stranger does not keep the peers waiting."""


class ProcessGroupError(JaxkvError):
    """The processes cannot meet: an address, a number, or a peer that does not come."""


class Meeting(NamedTuple):
    """What a process comes away with: a socket to each of its peers, and the port of jax's service at process 0."""

    lifelines: dict[int, socket.socket]
    service_port: int


def meet(address: tuple[str, int], num_processes: int, process_id: int, timeout_s: float) -> Meeting:
    """Wait for the other processes at `address`, process 0's. Raises ProcessGroupError."""
    hello = {"jaxkv": __version__, "processes": num_processes, "id": process_id}
    return (_receive if process_id == 0 else _call)(address, hello, time.monotonic() + timeout_s)


def _receive(address: tuple[str, int], hello: dict[str, Any], deadline_s: float) -> Meeting:
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
            port = free.getsockname()[1]
        for line in peers.values():
            _write_line(line, {"service_port": port})
        undo.pop_all()
        server.close()
    return Meeting(peers, port)


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


def _call(address: tuple[str, int], hello: dict[str, Any], deadline_s: float) -> Meeting:
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
    return Meeting({0: line}, int(answer["service_port"]))


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
