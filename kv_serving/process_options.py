"""Several processes of one command: who speaks, and how all of them end.

Contract: every process is given the same command but for its id, and does the same work; process 0 alone prints the
answer. Output of libraries (Gloo greets on stdout) never reaches stdout. A process that fails ends without a goodbye,
so that its peers end too, each with one line.
"""

import io
import os
import sys
from typing import TYPE_CHECKING

from kv_common.errors import JaxkvError

if TYPE_CHECKING:
    from kv_execution import ProcessGroup

_group: "ProcessGroup | None" = None


class ProcessOptionError(JaxkvError):
    """Options about processes that contradict each other."""


def join(
    coordinator: str | None, num_processes: int | None, process_id: int | None, tensor_parallel: int, timeout_s: float
) -> bool:
    """Meet the other processes, if there are to be any; returns whether this one prints the answer.

    Raises ProcessOptionError, or what `join_processes` raises.
    """
    global _group
    if coordinator is None and num_processes is None and process_id is None:
        return True
    if coordinator is None or num_processes is None or process_id is None:
        raise ProcessOptionError(
            "several processes need --coordinator, --num-processes and --process-id: give all three"
        )
    if num_processes == 1:
        raise ProcessOptionError("--num-processes is 1, and one process meets nobody: leave out the three options")
    if tensor_parallel == 1:
        raise ProcessOptionError(
            f"with --tp 1 each of {num_processes} processes would generate for itself: give --tp {num_processes}, or a "
            "multiple of it"
        )
    if not timeout_s > 0:
        raise ProcessOptionError(f"--peer-timeout is {timeout_s:g}; give seconds, more than 0")
    from kv_execution import join_processes

    _silence_libraries()
    _group = join_processes(coordinator, num_processes, process_id, timeout_s=timeout_s)
    if process_id > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    return process_id == 0


def leave() -> None:
    """The work is done and the answer out; when all have come this far, nobody is missed any more."""
    if _group is not None:
        sys.stdout.flush()
        _group.leave()


def fail(message: str) -> None:
    """End this process, and through its absence the others, with one line; does nothing where there are no others."""
    if _group is not None:
        _group.end(message)


def in_group() -> bool:
    """Whether this process has peers."""
    return _group is not None


def _silence_libraries() -> None:
    """Give Python's stdout a descriptor of its own, and everybody else's nowhere to go."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        own = os.fdopen(os.dup(1), "wb")
        sys.stdout = io.TextIOWrapper(own, sys.stdout.encoding, "replace", line_buffering=sys.stdout.isatty())
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
