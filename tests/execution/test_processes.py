"""Processes that cannot meet say why, before jax is asked."""

import contextlib
import errno
import re
import socket
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from patience import HANG_S, reserved_port

from kv_common import __version__
from kv_execution import ProcessGroup, ProcessGroupError, join_processes, process_meeting, processes
from kv_kernels.tensor_parallel import EXPERT, TENSOR_AXES, TensorMesh


@pytest.fixture
def port():
    """Of this machine, where nobody listens who was not told to."""
    with reserved_port() as reserved:
        yield reserved


def hello(process_id: int, num_processes: int = 2, version: str = __version__) -> dict:
    return {"jaxkv": version, "processes": num_processes, "id": process_id}


def in_time() -> float:
    return time.monotonic() + HANG_S


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


def test_a_peer_that_does_not_come_is_missed_in_time(port):
    with pytest.raises(ProcessGroupError, match=r"1 of 2 processes have come in the time there was"):
        join_processes(f"127.0.0.1:{port}", 2, 0, timeout_s=0.2)


def test_a_process_0_that_is_not_there_is_named_with_its_address(port):
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
def test_peers_that_do_not_match_are_refused_on_both_sides(said, message, port, monkeypatch):
    monkeypatch.setattr(process_meeting, "HELLO_S", HANG_S)
    address, refused = ("127.0.0.1", port), []

    def call() -> None:
        try:
            process_meeting._call(address, said, in_time())
        except ProcessGroupError as error:
            refused.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    with pytest.raises(ProcessGroupError, match=message) as caught:
        process_meeting._receive(address, hello(0), in_time())
    caller.join()
    assert refused == [str(caught.value)]


def test_a_stranger_at_the_door_is_sent_away_and_the_peers_meet(port, monkeypatch):
    monkeypatch.setattr(process_meeting, "HELLO_S", HANG_S)
    address, met = ("127.0.0.1", port), {}

    def receive() -> None:
        met["first"] = process_meeting._receive(address, hello(0), in_time())

    receiver = threading.Thread(target=receive)
    receiver.start()
    stranger = None
    while stranger is None:
        try:
            stranger = socket.create_connection(address, timeout=HANG_S)
        except ConnectionRefusedError:
            time.sleep(0.01)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    met["second"] = process_meeting._call(address, hello(1), in_time())
    receiver.join()
    with stranger, contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    assert met["first"].service_port == met["second"].service_port, "both know where jax's service will be"
    for lines, _ in met.values():
        for line in lines.values():
            line.close()


class Lifeline(NamedTuple):
    """A group of process 0, the socket of its peer, and what the group would have ended with."""

    group: ProcessGroup
    theirs: socket.socket
    ended: list[str]
    watcher: threading.Thread


@contextlib.contextmanager
def watched(monkeypatch, timeout_s):
    """A group whose one peer is a socket of ours."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(HANG_S)
    ended, before, counted = [], set(threading.enumerate()), threading.Event()

    def end(self, message: str) -> None:
        counted.wait(HANG_S)
        ended.append(message)

    monkeypatch.setattr(ProcessGroup, "end", end)
    group = ProcessGroup(0, 2, {1: ours}, timeout_s)
    started = set(threading.enumerate()) - before
    (watcher,) = (thread for thread in started if "_watch" in thread.name)
    counted.set()
    with ours, theirs:
        yield Lifeline(group, theirs, ended, watcher)
        group.leave()
        theirs.close()
        for thread in started:
            thread.join(HANG_S)
            assert not thread.is_alive()


@pytest.fixture
def lifeline(monkeypatch):
    """One on which silence is not taken for anything."""
    with watched(monkeypatch, 100 * HANG_S) as line:
        yield line


DEAD = "process 1 has ended, and process 0 cannot go on alone: start all of them again"


def test_a_peer_that_dies_is_noticed(lifeline):
    lifeline.theirs.close()
    lifeline.watcher.join(HANG_S)
    assert lifeline.ended == [DEAD]


def test_a_peer_that_is_silent_is_noticed(monkeypatch):
    with watched(monkeypatch, 0.5) as silent:
        silent.watcher.join(HANG_S)
        assert silent.ended == [
            "process 1 has not been heard of for 0.5 s, and process 0 cannot go on alone: start all of them again"
        ]


@pytest.mark.parametrize(("end", "reason"), [([b"q"], None), ([TimeoutError] * 4, "has not been heard of for 60 s")])
def test_neither_a_beat_in_time_nor_a_pause_of_everything_is_taken_for_silence(end, reason):
    class Paused:
        """A line on which each wait ends without a beat three times running, as after a pause, and then with one."""

        def __init__(self) -> None:
            self.answers = [*[TimeoutError, TimeoutError, TimeoutError, b"."] * 3, *end]

        def settimeout(self, timeout_s: float) -> None:
            assert timeout_s == 15

        def recv(self, size: int) -> bytes:
            answer = self.answers.pop(0)
            if answer is TimeoutError:
                raise answer
            return answer

    line = Paused()
    group = ProcessGroup(0, 2, {}, timeout_s=60)
    assert group._why_lost(line) == reason
    assert line.answers == []
    group.leave()


def test_a_group_beats(monkeypatch):
    with watched(monkeypatch, 0.5) as line:
        for _ in range(5):
            assert line.theirs.recv(1) == b"."


def test_a_peer_that_says_goodbye_is_not_missed(lifeline):
    lifeline.theirs.sendall(b".q")
    lifeline.theirs.close()
    lifeline.watcher.join(HANG_S)
    assert not lifeline.watcher.is_alive()
    assert lifeline.ended == []


def test_a_process_says_goodbye_once(lifeline):
    lifeline.group.leave()
    lifeline.group.leave()
    assert lifeline.theirs.recv(64) == b"q"


def test_a_process_says_goodbye_behind_jaxs_door_and_misses_who_dies_before_it(lifeline, monkeypatch):
    group, theirs, ended, watcher = lifeline

    def wait_for_the_peer() -> None:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert b"q" not in theirs.recv(64)
        theirs.close()
        watcher.join(HANG_S)

    monkeypatch.setattr(jax.distributed, "shutdown", wait_for_the_peer)
    group.leave()
    assert ended == [DEAD]


def test_a_process_that_goes_without_a_goodbye_misses_nobody_and_is_missed(lifeline):
    lifeline.group.abandon()
    assert lifeline.theirs.recv(64) == b""
    lifeline.watcher.join(HANG_S)
    assert not lifeline.watcher.is_alive()
    assert lifeline.ended == []


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
        theirs.settimeout(HANG_S)
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
