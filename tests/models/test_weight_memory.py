"""The memory that weights are loaded into."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import weight_memory
from models.weight_memory import ALIGNMENT, WeightMemory


@given(sizes=st.lists(st.integers(0, 5000), max_size=20))
def test_arrays_are_aligned_and_lie_apart(sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_memory, "RUN_BYTES", 8192)
        memory = WeightMemory()
        arrays = [memory.empty((size,), np.dtype(np.uint8)) for size in sizes]
    for number, array in enumerate(arrays):
        array[:] = number
    for number, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        assert array.shape == (size,)
        assert size == 0 or array.ctypes.data % ALIGNMENT == 0
        assert (array == number).all()


def test_an_array_larger_than_a_run_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(weight_memory, "RUN_BYTES", 4096)
    array = WeightMemory().empty((3, 5000), np.dtype(np.float32))
    array[:] = 1
    assert array.sum() == 15000


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_a_cpu_device_takes_the_memory_over(has_huge_pages, monkeypatch):
    if not has_huge_pages:
        monkeypatch.delattr(weight_memory.mmap, "MADV_HUGEPAGE")
    memory = WeightMemory()
    for shape in ((3,), (7, 129), (1000, 1000)):
        array = memory.empty(shape, np.dtype(np.float32))
        array[:] = 2
        placed = jax.device_put(array)
        assert placed.unsafe_buffer_pointer() == array.ctypes.data
        assert np.asarray(placed).sum() == 2 * array.size
