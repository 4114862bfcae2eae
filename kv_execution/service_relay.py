"""A way to jax's coordination service that never breaks.

Contract: jax aborts a process whose connection to the service breaks, with a stack trace and before anybody can say
why, and `jax.distributed.initialize` offers nothing against it. So jax is given an address in its own process, which
leads to the service for as long as there is one. Where the service has ended, jax meets silence, which it bears for
its heartbeat timeout; the lifelines of `ProcessGroup` say what happened long before.
"""

import contextlib
import socket
import threading
import time

RETRY_S = 0.02


class ServiceRelay:
    """Carries every connection made to `address` (HOST:PORT, of this machine alone) to the service, by two threads."""

    def __init__(self, service: tuple[str, int], timeout_s: float) -> None:
        """Wait for the service to start. Raises OSError where it does not in `timeout_s`."""
        _wait_for(service, time.monotonic() + timeout_s)
        self._service = service
        self._kept: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            ours = self._server.accept()[0]
            self._kept.append(ours)  # or it would be closed as soon as nobody carries from it
            threading.Thread(target=self._carry, args=(ours,), daemon=True).start()

    def _carry(self, ours: socket.socket) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self._service) as theirs:
            threading.Thread(target=_pump, args=(theirs, ours), daemon=True).start()
            _pump(ours, theirs)
            theirs.shutdown(socket.SHUT_RDWR)


def _wait_for(service: tuple[str, int], deadline_s: float) -> None:
    while True:
        try:
            return socket.create_connection(service, timeout=max(0.01, deadline_s - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(RETRY_S)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            sink.sendall(part)
