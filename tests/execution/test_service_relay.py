"""jax's way to its service carries everything, and falls silent where the service ends."""

import socket
import threading

import pytest
from patience import HANG_S, reserved_port

from kv_execution.service_relay import ServiceRelay


@pytest.fixture
def service():
    with reserved_port() as port, socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(HANG_S)
        yield server


def connect(relay: ServiceRelay) -> socket.socket:
    host, port = relay.address.split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_S)


def accept(service: socket.socket) -> socket.socket:
    accepted = service.accept()[0]
    accepted.settimeout(HANG_S)
    return accepted


@pytest.fixture
def relay(service):
    made = ServiceRelay(service.getsockname(), timeout_s=HANG_S)
    accept(service).close()  # it has seen that somebody is there
    return made


def read(line: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        received += line.recv(size)
    return received


def test_connections_are_carried_both_ways_and_apart(service, relay):
    large = bytes(range(256)) * 4096
    with connect(relay) as first, accept(service) as first_end, connect(relay) as second, accept(service) as second_end:
        sender = threading.Thread(target=first.sendall, args=(large,))
        sender.start()
        second.sendall(b"another")
        second_end.sendall(b"answer")
        assert read(second_end, 7) == b"another"
        assert read(second, 6) == b"answer"
        assert read(first_end, len(large)) == large
        sender.join()


def test_what_a_service_said_before_it_ended_arrives_and_then_comes_silence(service, relay):
    with connect(relay) as ours:
        with accept(service) as theirs:
            theirs.sendall(b"last words")
        service.close()
        assert read(ours, 10) == b"last words"
        ours.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ours.recv(1)
        ours.sendall(b"still there?")


def test_a_connection_to_a_service_that_has_ended_meets_silence(service, relay):
    service.close()
    with connect(relay) as ours:
        ours.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ours.recv(1)


def test_the_service_sees_a_client_go(service, relay):
    with connect(relay) as ours, accept(service) as theirs:
        ours.close()
        assert theirs.recv(1) == b""


def test_a_service_that_starts_late_is_waited_for():
    servers = []
    with reserved_port() as port:
        address = ("127.0.0.1", port)
        starter = threading.Timer(0.2, lambda: servers.append(socket.create_server(address)))
        starter.start()
        ServiceRelay(address, timeout_s=HANG_S)
        starter.join()
        servers[0].close()


def test_a_service_that_is_not_there_is_an_error():
    with reserved_port() as port, pytest.raises(ConnectionRefusedError):
        ServiceRelay(("127.0.0.1", port), timeout_s=0.1)
