"""The processes of one program while they run, and how they end together.

Contract: the sockets over which processes met stay open as lifelines. A peer that dies, or is silent for `timeout_s`,
ends the others with one line and EXIT_STATUS; one that has left is not missed. All leave by the same door, jax's
shutdown, and say goodbye only behind it: whoever dies before that is missed.
"""

import contextlib
import os
import socket
import sys
import threading
from types import TracebackType
from typing import NoReturn

import jax

from kv_kernels.peers import together

EXIT_STATUS = 2
"""Of a process that its peers have left."""

BEATS_PER_TIMEOUT = 4
_BEAT, _GOODBYE = b".", b"q"


class ProcessGroup:
    """The peers of this process, and the lifelines to them: process 0 has one to each, the others one to process 0."""

    def __init__(
        self, process_id: int, num_processes: int, lifelines: dict[int, socket.socket], timeout_s: float
    ) -> None:
        self.process_id = process_id
        self.num_processes = num_processes
        self._lifelines = lifelines
        self._timeout_s = timeout_s
        self._left = threading.Event()
        self._reporting = threading.Lock()
        for peer, line in lifelines.items():
            threading.Thread(target=self._watch, args=(peer, line), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def leave(self) -> None:
        """Wait until all peers leave, and say goodbye: from now on none is missed, nor misses this one.

        jax cannot compute across processes any more. Raises PeerLostError where a peer does not come to leave.
        """
        if not self._left.is_set():
            with together("the leave-taking", self.num_processes):
                jax.distributed.shutdown()
            self._left.set()
            for line in self._lifelines.values():
                with contextlib.suppress(OSError):
                    line.sendall(_GOODBYE)

    def abandon(self) -> None:
        """Go without a goodbye, so that the peers end."""
        self._left.set()
        for line in self._lifelines.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def end(self, message: str) -> NoReturn:
        """End this process with one line, whoever of several threads is first to notice that a peer is lost."""
        with self._reporting:
            sys.stderr.write(f"jaxkv: {message}\n")  # in one piece, whoever else writes there
            sys.stderr.flush()
            # Not sys.exit: jax would wait for the peer at the door, and the main thread may be waiting for it already.
            os._exit(EXIT_STATUS)

    def end_behind_tracebacks(self) -> None:
        """From now on an exception that nobody catches ends this process at once, until it has left: at the door jax
        would wait for peers, and they for this process's part of a step.
        """
        show = sys.excepthook

        def show_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            show(kind, error, trace)
            if not self._left.is_set():
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                os._exit(1)

        sys.excepthook = show_and_end

    def _watch(self, peer: int, line: socket.socket) -> None:
        reason = self._why_lost(line)
        if reason is not None and not self._left.is_set():
            self.end(
                f"process {peer} {reason}, and process {self.process_id} cannot go on alone: start all of them again"
            )

    def _why_lost(self, line: socket.socket) -> str | None:
        """Wait for the end of a lifeline, and say what it means; None for a goodbye."""
        missed = 0
        while missed < BEATS_PER_TIMEOUT:  # beat by beat: a pause of the whole machine, however long, costs one
            try:
                line.settimeout(self._timeout_s / BEATS_PER_TIMEOUT)
                received = line.recv(64)
            except TimeoutError:
                missed += 1
                continue
            except OSError as error:
                return f"cannot be reached ({error.strerror})"
            if not received:
                return "has ended"
            if _GOODBYE in received:
                return None
            missed = 0
        return f"has not been heard of for {self._timeout_s:g} s"

    def _beat(self) -> None:
        while not self._left.wait(self._timeout_s / BEATS_PER_TIMEOUT):
            for line in self._lifelines.values():
                with contextlib.suppress(OSError):  # the watcher of that line will say so
                    line.sendall(_BEAT)
