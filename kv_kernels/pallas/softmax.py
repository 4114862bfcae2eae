"""The part that every attention kernel shares: queries of one K/V head over a range of a row's keys.

An online softmax (Milakov and Gimelshein, 2018) over blocks of keys that are gathered through the page table, so any
page size will do. Blocks are counted from position 0: the order of a query's reduction depends on neither its batch
nor its chunk. Triton wants sizes that are powers of two, of at least 16 in a product: group and head are padded here,
in registers, never in memory.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kv_kernels.provider import PoolPair, Scoring

NOTHING_YET = np.float32(-1e30)
"""A running maximum below every score, and finite: the difference of two infinities is NaN."""
BLOCK_KEYS = {4: 32, 2: 64}
"""Most keys of a block by the bytes of an element."""
BLOCK_BYTES = 16384
MIN_PRODUCT = 16


@dataclass(frozen=True)
class HeadShape:
    """The static sizes of attention over a pool, and what is computed from them."""

    group: int
    head_dim: int
    tokens_per_page: int
    dtype: Any  # of the products' operands

    @property
    def group_lanes(self) -> int:
        return pl.next_power_of_2(self.group)

    @property
    def dim_lanes(self) -> int:
        return max(MIN_PRODUCT, pl.next_power_of_2(self.head_dim))

    @property
    def row_bytes(self) -> int:
        return self.dim_lanes * np.dtype(self.dtype).itemsize

    @property
    def block_keys(self) -> int:
        """Keys taken at once: as many as leave room for two blocks of K and of V in shared memory."""
        return max(MIN_PRODUCT, min(BLOCK_KEYS[np.dtype(self.dtype).itemsize], BLOCK_BYTES // self.row_bytes))


class KeySource(NamedTuple):
    """Where a row's keys are: refs of both pools and of the page ids, the row's first entry there, the pool row of the
    layer's page 0, and the K/V head.
    """

    pools: tuple[Any, Any]
    page_ids: Any
    first_entry: jax.Array
    first_page: jax.Array
    kv_head: jax.Array


class Softmax(NamedTuple):
    """A softmax under way: best and total [queries], values [queries, dim_lanes], f32."""

    best: jax.Array
    total: jax.Array
    values: jax.Array


def head_shape(q: jax.Array, pools: PoolPair) -> HeadShape:
    """Of q [tokens, heads, head_dim]; products take the pool's dtype where q has it, float32 otherwise."""
    tokens_per_page, kv_heads, head_dim = pools.k.shape[1:]
    dtype = q.dtype if q.dtype == pools.k.dtype else jnp.dtype(jnp.float32)
    return HeadShape(q.shape[1] // kv_heads, head_dim, tokens_per_page, dtype)


def attend_keys(
    q: jax.Array,
    position: jax.Array,
    source: KeySource,
    shape: HeadShape,
    scoring: Scoring,
    *,
    first_key: jax.Array | int,
    end_key: jax.Array,
) -> Softmax:
    """q [queries, dim_lanes] in shape.dtype, at `position` [queries], over keys `first_key` to `end_key` exclusive,
    between which the row has all of them.
    """
    block = shape.block_keys
    dim = lax.broadcasted_iota(jnp.int32, (1, shape.dim_lanes), 1)

    def attend_block(index: jax.Array, carry: Softmax) -> Softmax:
        key_position = index * block + lax.iota(jnp.int32, block)
        held = (key_position >= first_key) & (key_position < end_key)
        entry = source.first_entry + divide(key_position, shape.tokens_per_page)
        page = plgpu.load(source.page_ids.at[entry], mask=held, other=0) + source.first_page
        offset = lax.rem(key_position, jnp.full_like(key_position, shape.tokens_per_page))
        where = (page[:, None], offset[:, None], source.kv_head, dim)
        # What is not held is never read: a weight of 0 does not silence a NaN in the stale tail of a page, or in one
        # that was given back.
        mask = held[:, None] & (dim < shape.head_dim)
        key, value = (plgpu.load(pool.at[where], mask=mask, other=0).astype(shape.dtype) for pool in source.pools)
        score = _product(q, key, contract=1) * np.float32(scoring.scale)
        if scoring.soft_cap is not None:
            score = np.float32(scoring.soft_cap) * jnp.tanh(score / np.float32(scoring.soft_cap))
        visible = key_position[None, :] <= position[:, None]
        if scoring.window is not None:
            visible &= key_position[None, :] > position[:, None] - scoring.window
        score = jnp.where(visible, score, -jnp.inf)
        best = jnp.maximum(carry.best, jnp.max(score, axis=1))
        weight = jnp.exp(score - best[:, None])
        shrink = jnp.exp(carry.best - best)
        added = _product(weight.astype(shape.dtype), value, contract=0)
        return Softmax(best, carry.total * shrink + jnp.sum(weight, axis=1), carry.values * shrink[:, None] + added)

    queries = q.shape[0]
    empty = Softmax(
        jnp.full((queries,), NOTHING_YET, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, shape.dim_lanes), jnp.float32),
    )
    return lax.fori_loop(divide(first_key, block), divide(end_key + block - 1, block), attend_block, empty)


def first_visible(position: jax.Array, scoring: Scoring) -> jax.Array | int:
    """The first key that a query at `position` sees."""
    return 0 if scoring.window is None else jnp.maximum(position - scoring.window + 1, 0)


def divide(number: jax.Array | int, divisor: int) -> jax.Array | int:
    """Of numbers that are not negative, and without the corrections of `//` for those that are."""
    if isinstance(number, int):
        return number // divisor
    return lax.div(number, jnp.full_like(number, divisor))


def _product(a: jax.Array, b: jax.Array, *, contract: int) -> jax.Array:
    # Exact for float32 too, where the default is TF32.
    return lax.dot_general(
        *(a, b, (((1,), (contract,)), ((), ()))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
