"""The native zeros: every byte of an array of any size and dtype."""

import jax
import numpy as np
import pytest

from kv_kernels.native import NativeProvider

HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0, 1, 77, HUGE_PAGE // 2, HUGE_PAGE + 1, 3 * HUGE_PAGE + 5])
def test_every_byte_is_zero_where_memory_was_used_before(size, dtype):
    make = jax.jit(lambda: NativeProvider().zeros((size,), dtype))
    for _ in range(3):  # memory that is given back is handed out again
        jax.block_until_ready(jax.jit(lambda: jax.numpy.full((size,), 7, dtype))())
        made = make()
        assert made.shape == (size,)
        assert made.dtype == dtype
        assert not np.asarray(made).any()


def test_an_array_of_several_axes_has_its_shape():
    made = NativeProvider().zeros((4, 16, 3, 64), "float32")
    assert made.shape == (4, 16, 3, 64)
    assert not np.asarray(made).any()
