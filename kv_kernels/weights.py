"""Weights as pytrees: dense, or block-quantized the way GGUF stores them.

Every product with a weight goes through a provider's `linear`, so this module holds layout and nothing that multiplies:
indexing, sizes, and `dequantize`, the definition of a quantized weight's value that every provider must agree with.
Leading `stack` axes (layers) come first, so that a layer index is an operand and no layer is ever sliced out by the
caller.

Quantized rows are split in blocks of 32 along `in`: value = d*q (q8_0), d*(q-8) (q4_0) or d*q+m (q4_1).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_SIZE = 32
"""Elements that share one scale."""

QuantKind = Literal["q8_0", "q4_0", "q4_1"]
Array = jax.Array | np.ndarray
LayerIndex = int | jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class DenseWeight:
    """values [*stack, out, in], float32, float16 or bfloat16."""

    values: Array

    @property
    def out_features(self) -> int:
        return self.values.shape[-2]

    @property
    def in_features(self) -> int:
        return self.values.shape[-1]

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(self.values.shape[:-2])

    @property
    def nbytes(self) -> int:
        return _nbytes(self)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["quants", "scales", "mins"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True, eq=False)
class BlockQuantWeight:
    """A GGUF block-quantized weight, its parts apart.

    quants int8 [*stack, out, in] for q8_0; uint8 [*stack, out, in/2] for q4_*: byte j of a block's 16 holds element j
    in the low nibble and element j+16 in the high one. scales float16 [*stack, out, in/32]; mins the same, q4_1 only.
    """

    quants: Array
    scales: Array
    mins: Array | None
    kind: QuantKind

    @property
    def out_features(self) -> int:
        return self.scales.shape[-2]

    @property
    def in_features(self) -> int:
        return self.scales.shape[-1] * BLOCK_SIZE

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(self.scales.shape[:-2])

    @property
    def nbytes(self) -> int:
        return _nbytes(self)


Weight = DenseWeight | BlockQuantWeight


def take_layer(weight: Weight, layer: LayerIndex) -> Weight:
    """Entry `layer` of the first stack axis; `layer` may be traced. XLA may copy the entry."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, axis=0, keepdims=False), weight)


def take_rows(weight: Weight, rows: Array) -> Weight:
    """Rows `rows` [n] int of an unstacked weight [out, in], as a weight [n, in]; out of range is clamped."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), weight)


def dequantize(weight: Weight, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The values [*stack, out, in], computed in float32 and rounded once to `dtype`."""
    if isinstance(weight, DenseWeight):
        return jnp.asarray(weight.values).astype(dtype)
    blocks = _unpack_quants(weight).astype(jnp.float32)
    values = blocks * jnp.asarray(weight.scales).astype(jnp.float32)[..., None]
    if weight.mins is not None:
        values = values + jnp.asarray(weight.mins).astype(jnp.float32)[..., None]
    return values.reshape(*weight.stack, weight.out_features, weight.in_features).astype(dtype)


def _unpack_quants(weight: BlockQuantWeight) -> jax.Array:
    """Integer quants [*stack, out, in/32, 32], q4_0's offset of 8 taken off."""
    quants = jnp.asarray(weight.quants)
    block_count = weight.in_features // BLOCK_SIZE
    if weight.kind == "q8_0":
        return quants.reshape(*weight.stack, weight.out_features, block_count, BLOCK_SIZE)
    packed = quants.reshape(*weight.stack, weight.out_features, block_count, BLOCK_SIZE // 2)
    nibbles = jnp.concatenate([packed & 0xF, packed >> 4], axis=-1).astype(jnp.int8)
    return nibbles - jnp.int8(8) if weight.kind == "q4_0" else nibbles


def _nbytes(weight: Weight) -> int:
    # Not leaf.nbytes: abstract leaves (ShapeDtypeStruct) have none.
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(weight))
