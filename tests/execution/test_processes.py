"""Processes that cannot meet say why, before jax is asked."""

import contextlib
import errno
import re
import socket
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from kv_common import __version__
from kv_execution import ProcessGroup, ProcessGroupError, join_processes, process_meeting, processes
from kv_kernels.tensor_parallel import EXPERT, TENSOR_AXES, TensorMesh


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def hello(process_id: int, num_processes: int = 2, version: str = __version__) -> dict:
    return {"jaxkv": version, "processes": num_processes, "id": process_id}


def soon() -> float:
    return time.monotonic() + 20


@pytest.mark.parametrize(
    ("coordinator", "num_processes", "process_id", "message"),
    [
        ("somewhere", 2, 0, "the coordinator is 'somewhere'; give HOST:PORT of process 0"),
        ("host:99999", 2, 0, "the coordinator is 'host:99999'"),
        (":5000", 2, 0, "the coordinator is ':5000'"),
        ("host:5000", 1, 0, "process 0 of 1 cannot be: give at least 2 processes"),
        ("host:5000", 2, 2, "process 2 of 2 cannot be"),
    ],
)
def test_what_cannot_be_is_refused(coordinator, num_processes, process_id, message):
    with pytest.raises(ProcessGroupError, match=message):
        join_processes(coordinator, num_processes, process_id)


def test_a_peer_that_does_not_come_is_missed_in_time():
    with pytest.raises(ProcessGroupError, match=r"1 of 2 processes have come in the time there was"):
        join_processes(f"127.0.0.1:{free_port()}", 2, 0, timeout_s=0.2)


def test_a_process_0_that_is_not_there_is_named_with_its_address():
    port = free_port()
    with pytest.raises(ProcessGroupError, match=f"process 1 cannot reach process 0 at 127.0.0.1:{port}"):
        join_processes(f"127.0.0.1:{port}", 2, 1, timeout_s=0.2)


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ProcessGroupError, match=f"process 0 cannot listen at 127.0.0.1:{port}"):
            join_processes(f"127.0.0.1:{port}", 2, 0, timeout_s=0.2)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (hello(1, version="0.0"), "install one version everywhere"),
        (hello(1, num_processes=3), "process 0 was told of 2 processes and a peer of 3"),
        (hello(0), "process id 0 came twice or is none"),
    ],
)
def test_peers_that_do_not_match_are_refused_on_both_sides(said, message):
    address = ("127.0.0.1", free_port())
    refused = []

    def call() -> None:
        try:
            process_meeting._call(address, said, soon())
        except ProcessGroupError as error:
            refused.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    with pytest.raises(ProcessGroupError, match=message) as caught:
        process_meeting._receive(address, hello(0), soon())
    caller.join()
    assert refused == [str(caught.value)]


def test_a_stranger_at_the_door_is_sent_away_and_the_peers_meet():
    address = ("127.0.0.1", free_port())
    met = {}

    def receive() -> None:
        met["first"] = process_meeting._receive(address, hello(0), soon())

    receiver = threading.Thread(target=receive)
    receiver.start()
    stranger = None
    while stranger is None:
        try:
            stranger = socket.create_connection(address, timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.01)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    met["second"] = process_meeting._call(address, hello(1), soon())
    receiver.join()
    with stranger, contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    assert met["first"].service_port == met["second"].service_port, "both know where jax's service will be"
    for lines, _ in met.values():
        for line in lines.values():
            line.close()


@pytest.fixture
def lifeline(monkeypatch):
    """A group of process 0, the socket of its peer, and what it would have ended with."""
    ours, theirs = socket.socketpair()
    ended, happened = [], threading.Event()

    def end(self, message: str) -> None:
        ended.append(message)
        happened.set()

    monkeypatch.setattr(ProcessGroup, "end", end)
    group = ProcessGroup(0, 2, {1: ours}, timeout_s=0.5)
    yield group, theirs, ended, happened
    group.leave()
    theirs.close()
    time.sleep(0.05)
    ours.close()


def test_a_peer_that_dies_is_noticed(lifeline):
    _, theirs, ended, happened = lifeline
    theirs.close()
    assert happened.wait(5)
    assert ended == ["process 1 has ended, and process 0 cannot go on alone: start all of them again"]


def test_a_peer_that_is_silent_is_noticed_and_one_that_beats_is_not(lifeline):
    _, theirs, ended, happened = lifeline
    for _ in range(8):
        theirs.sendall(b".")
        assert not happened.wait(0.1)
    assert happened.wait(5)
    assert ended == [
        "process 1 has not been heard of for 0.5 s, and process 0 cannot go on alone: start all of them again"
    ]


def test_a_peer_that_says_goodbye_is_not_missed(lifeline):
    _, theirs, ended, happened = lifeline
    theirs.sendall(b".q")
    theirs.close()
    assert not happened.wait(0.8)
    assert ended == []


def test_a_process_says_goodbye_once(lifeline):
    group, theirs, _, _ = lifeline
    group.leave()
    group.leave()
    theirs.settimeout(5)
    received = b""
    while b"q" not in received:
        received += theirs.recv(64)
    assert received.count(b"q") == 1


def test_a_process_says_goodbye_behind_jaxs_door_and_misses_who_dies_before_it(lifeline, monkeypatch):
    group, theirs, ended, happened = lifeline

    def wait_for_the_peer() -> None:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert b"q" not in theirs.recv(64)
        theirs.close()
        assert happened.wait(5)

    monkeypatch.setattr(jax.distributed, "shutdown", wait_for_the_peer)
    group.leave()
    assert ended == ["process 1 has ended, and process 0 cannot go on alone: start all of them again"]


def test_a_process_that_goes_without_a_goodbye_misses_nobody_and_is_missed(lifeline):
    group, theirs, ended, happened = lifeline
    group.abandon()
    theirs.settimeout(5)
    assert theirs.recv(64) == b""
    assert not happened.wait(0.8)
    assert ended == []


def test_a_service_that_cannot_be_reached_is_named_with_its_address_and_the_peers_are_left(monkeypatch):
    def refuse(service: tuple[str, int], timeout_s: float) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    ours, theirs = socket.socketpair()
    monkeypatch.setattr("kv_execution.processes.meet", lambda *_: process_meeting.Meeting({0: ours}, 8888))
    monkeypatch.setattr("kv_execution.processes.ServiceRelay", refuse)
    message = r"process 1 met the others, but not jax's service at host:8888 \(\[Errno \d+\] Connection refused\)"
    with ours, theirs:
        with pytest.raises(ProcessGroupError, match=message):
            join_processes("host:7777", 2, 1)
        theirs.settimeout(5)
        assert theirs.recv(64) == b"", "no goodbye"


@pytest.mark.parametrize("experts", [1, 2])
def test_every_group_of_devices_that_a_step_sums_over_is_connected_first(experts, monkeypatch):
    devices = np.array(jax.devices()[:8]).reshape(8 // experts // 2, 2, experts)
    mesh = TensorMesh(Mesh(devices, (*TENSOR_AXES, EXPERT)))
    modules, jit = [], jax.jit

    def watched(function):
        jitted = jit(function)
        return lambda *arguments: modules.append(jitted.lower(*arguments).compile().as_text()) or jitted(*arguments)

    processes.connect(mesh)
    monkeypatch.setattr(processes.jax, "jit", watched)
    processes.connect(mesh)
    assert modules == [], "one process has nobody to meet"
    monkeypatch.setattr(TensorMesh, "num_processes", 2)
    processes.connect(mesh)
    (module,) = modules
    sizes = [len(group.split(",")) for group in re.findall(r" all-reduce\(.*replica_groups=\{\{([\d,]*)\}", module)]
    assert sorted(sizes) == ([4, 8] if experts == 2 else [8])
