"""Memory for a model's weights: runs of huge pages, where the system has them, that parameters are laid in one behind
the other.

A decode step reads every weight once, and on pages of 4 KiB it waits for the translation of addresses as well as for
the weights. Memory that is not used yet is not there: a run costs what is laid in it.
"""

import contextlib
import math
import mmap

import numpy as np

ALIGNMENT = 64
"""Bytes to which XLA aligns what it computes with on a CPU: `jax.device_put` takes over what begins there, and copies
what does not."""

RUN_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20


class WeightMemory:
    """One per load. A run is given back when no array lies in it any more."""

    def __init__(self) -> None:
        self._run = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of `shape` whose contents are not set."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._run):
            self._run = _new_run(max(size, RUN_BYTES))
        part, self._run = self._run[:size], self._run[-(-size // ALIGNMENT) * ALIGNMENT :]
        return part.view(dtype).reshape(shape)


def _new_run(size: int) -> np.ndarray:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        run = np.empty(size + ALIGNMENT, np.uint8)
        return run[-run.ctypes.data % ALIGNMENT :][:size]
    # Private: what is shared, the default, gets no huge pages.
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them; the memory is as good
        mapping.madvise(mmap.MADV_HUGEPAGE)
    run = np.frombuffer(mapping, np.uint8)
    return run[-run.ctypes.data % HUGE_PAGE_BYTES :][:size]
