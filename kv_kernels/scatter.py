"""Writing rows of a donated array in place.

Two traps stand behind this one function. `.at[-1]` wraps to the last row even with `mode="drop"`. And XLA turns a
scatter of a single row into a select over the whole array, which copies the array: a single row is therefore written
twice.
"""

import jax
import jax.numpy as jnp


def write_rows(array: jax.Array, rows: jax.Array | tuple[jax.Array, ...], values: jax.typing.ArrayLike) -> jax.Array:
    """`array` [n, ...] with `values` [k, ...] (or one for all) at `rows` [k] i32, or at rows of rows where that is one
    array for each leading axis; a row outside 0 .. n - 1 writes nothing.
    """
    index = rows if isinstance(rows, tuple) else (rows,)
    values = jnp.broadcast_to(jnp.asarray(values).astype(array.dtype), (*index[0].shape, *array.shape[len(index) :]))
    if values.shape[0] == 1:
        index, values = tuple(jnp.repeat(each, 2, axis=0) for each in index), jnp.repeat(values, 2, axis=0)
    return array.at[index].set(values, mode="drop", wrap_negative_indices=False)
