"""The native argmax against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_case import AVAILABLE_LEVELS, running

from kv_kernels.native import NativeProvider
from kv_kernels.reference import ReferenceProvider

NATIVE, REFERENCE = NativeProvider(), ReferenceProvider()
LARGEST = float(np.finfo(np.float32).max)


@given(
    rows=st.lists(
        st.lists(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, LARGEST, -LARGEST, np.inf, -np.inf, np.nan]),
            min_size=41,
            max_size=41,
        ),
        max_size=4,
    ),
    level=st.sampled_from(AVAILABLE_LEVELS),
)
def test_ties_nan_and_infinities_are_taken_as_the_reference_takes_them(rows, level):
    scores = jnp.asarray(np.array(rows, np.float32).reshape(len(rows), 41))
    with running(level=level):
        np.testing.assert_array_equal(NATIVE.argmax(scores), REFERENCE.argmax(scores))


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("vocab", [1, 7, 1024, 1025, 49152])
def test_the_first_of_the_largest_is_found_wherever_it_is(vocab, level):
    scores = np.random.default_rng(vocab).standard_normal((5, vocab)).astype(np.float32)
    for row, where in enumerate((0, vocab - 1, vocab // 2)):
        scores[row, where] = scores[row, where // 2] = 9
    with running(level=level):
        np.testing.assert_array_equal(NATIVE.argmax(jnp.asarray(scores)), scores.argmax(1))


def test_scores_of_another_shape_are_an_error():
    call = jax.ffi.ffi_call("jaxkv_argmax", jax.ShapeDtypeStruct((2,), jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"result has shape \[2\], wanted \[3\]"):
        jax.block_until_ready(call(jnp.zeros((3, 8))))
