"""How tests wait: for the state itself, on a machine that may be slow, or stand still for a minute.

Contract: nothing here passes or fails by the clock. HANG_S is met by what hangs alone, and costs nothing where nothing
does.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

HANG_S = 300.0
"""By when whatever is waited for has happened, unless it never will."""

LOOK_S = 0.005


def wait_for(condition: Callable[[], object]) -> None:
    """Look until it holds. Looks are counted and not seconds: a pause of the whole process costs one."""
    for _ in range(round(HANG_S / LOOK_S)):
        if condition():
            return
        time.sleep(LOOK_S)
    raise AssertionError("it did not come about")


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody is given meanwhile, and where one can listen who asks for it by its number.

    Bound, so that it is no one's by chance; not listened at, so that connections are refused until somebody does.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
