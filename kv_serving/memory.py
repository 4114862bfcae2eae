"""Memory that the allocator holds on to after a burst: loading and compiling free tens of megabytes in small pieces."""

import contextlib
import ctypes


def release_unused_memory() -> None:
    """Give free heap pages back to the system, where the C library can."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc alone has it; Windows has no library None
        ctypes.CDLL(None).malloc_trim(0)
