"""The largest of a row of scores, by XLA: ties go to the lowest index, whatever the platform and the number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SIGN = np.uint32(0x80000000)
_LEAST_KEY = ~np.float32(np.inf).view(np.int32)
"""Of -inf, as a signed integer."""


def below_infinity(scores: jax.Array) -> jax.Array:
    """nan as -inf, and infinity as the largest float: it still wins, and no difference to it is nan."""
    return jnp.where(jnp.isnan(scores), -jnp.inf, jnp.minimum(scores, float(np.finfo(np.float32).max)))


def ordered_keys(scores: jax.Array) -> jax.Array:
    """uint32 of the shape of scores f32, none nan, that compare as the floats do; -0.0 and 0.0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def argmax(scores: jax.Array) -> jax.Array:
    """Where the largest of each row of scores [rows, columns] f32, none nan, is -> [rows] i32; -1 for one of -inf."""
    # Through integers, whose reductions a CPU vectorizes.
    keys = lax.bitcast_convert_type(ordered_keys(scores) ^ _SIGN, jnp.int32)
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)
    largest = jnp.max(keys, axis=1, keepdims=True)
    first = jnp.min(jnp.where(keys == largest, ids, scores.shape[1]), axis=1)
    return jnp.where(largest[:, 0] > _LEAST_KEY, first, -1)
