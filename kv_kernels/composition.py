"""The passes of a step in jax.numpy over a provider's basic operations: the definition of `linear` and `attend`.

A provider that fuses a pass agrees with what stands here; one that does not inherits it, and XLA fuses what it can. So
it is with products and rows of weights, for a provider that has kernels for the cache alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.argmax import argmax, below_infinity
from kv_kernels.dequantize import dequantize
from kv_kernels.provider import (
    Activation,
    Affine,
    CacheAttended,
    KernelProvider,
    Norm,
    Placement,
    PoolPair,
    Rotation,
    Scoring,
    Tiles,
)
from kv_kernels.scatter import write_rows
from kv_kernels.weights import (
    BlockQuantWeight,
    DenseWeight,
    LayerIndex,
    MixedWeight,
    StoredWeight,
    Weight,
    take_layer,
    take_rows,
)


class ComposedKernels:
    """Everything of a provider but `append_kv` and `paged_attention`, by XLA."""

    def product(
        self, x: jax.Array, weight: Weight, layer: LayerIndex | None, out_dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """See KernelProvider."""
        return multiply(x, weight, layer, out_dtype)

    def embed(self, token_ids: jax.Array, weight: StoredWeight) -> jax.Array:
        """See KernelProvider."""
        return dequantize(take_rows(weight, token_ids), jnp.float32)

    def normalize(self, x: jax.Array, norm: Norm, layer: LayerIndex | None) -> jax.Array:
        """See KernelProvider."""
        return normalize(x, norm, layer)

    def linear(
        self: KernelProvider,
        x: jax.Array,
        matrices: Sequence[Affine],
        layer: LayerIndex | None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
        activation: Activation | None = None,
        out_dtype: jax.typing.DTypeLike | None = None,
        used: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """See KernelProvider."""
        dtype = jnp.dtype(out_dtype or x.dtype)
        if norm is not None:
            x = self.normalize(x, norm, layer)
        results = tuple(_biased(self, x, matrix, layer, dtype) for matrix in matrices)
        if activation is not None:
            gate, up = results
            results = (activate(gate, activation) * up,)
        if residual is not None:
            (result,) = results
            results = (residual + result,)
        return results

    def grouped_mlp(
        self: KernelProvider,
        x: jax.Array,
        gate: Weight,
        up: Weight,
        down: Weight,
        tiles: Tiles,
        k: int,
        *,
        activation: Activation,
    ) -> jax.Array:
        """See KernelProvider."""

        def compute(tile: jax.Array, results: jax.Array) -> jax.Array:
            entry, pair = tiles.entry[tile], tiles.pair[tile]
            (wide,) = self.linear(x[pair // k], (Affine(gate), Affine(up)), entry, activation=activation)
            (out,) = self.linear(wide, (Affine(down),), entry, out_dtype=jnp.float32)
            return results.at[pair].set(out, mode="drop")

        results = jnp.zeros((x.shape[0] * k, down.out_features), jnp.float32)
        return jax.lax.fori_loop(0, tiles.used, compute, results)

    def zeros(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        """See KernelProvider."""
        return jnp.zeros(shape, dtype)

    def argmax(self, scores: jax.Array) -> jax.Array:
        """See KernelProvider."""
        return argmax(below_infinity(scores))

    def most_likely(
        self: KernelProvider, x: jax.Array, matrix: Affine, *, norm: Norm, used: jax.Array | None = None
    ) -> jax.Array:
        """See KernelProvider."""
        (logits,) = self.linear(x, (matrix,), None, norm=norm, out_dtype=jnp.float32)
        # Kept apart, so that the product is what XLA makes of it where the logits are wanted.
        return self.argmax(jax.lax.optimization_barrier(logits))

    def attend(
        self: KernelProvider,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pools: PoolPair,
        placement: Placement,
        plan: Any,
        *,
        layer: LayerIndex,
        num_pages: int,
        scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> CacheAttended:
        """See KernelProvider."""
        first_page = layer * num_pages
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        pools = prepare_pages(pools, placement, first_page)
        pools = self.append_kv(k, v, placement.slots + first_page * pools.k.shape[1], pools)
        return CacheAttended(self.paged_attention(q, pools, plan, first_page=first_page, scoring=scoring), pools)


def _biased(
    provider: KernelProvider, x: jax.Array, matrix: Affine, layer: LayerIndex | None, dtype: jnp.dtype
) -> jax.Array:
    if matrix.bias is None:
        return provider.product(x, matrix.weight, layer, dtype)
    return (provider.product(x, matrix.weight, layer, jnp.float32) + of_layer(matrix.bias, layer)).astype(dtype)


def multiply(
    x: jax.Array,
    weight: Weight,
    layer: LayerIndex | None,
    out_dtype: jax.typing.DTypeLike | None,
    *,
    for_cpu: bool = False,
) -> jax.Array:
    """`KernelProvider.product` by XLA; `for_cpu` goes around what its CPU backend does badly."""
    if isinstance(weight, MixedWeight):
        return switch_part(weight, layer, lambda part, at: multiply(x, part, at, out_dtype, for_cpu=for_cpu))
    if layer is not None:
        weight = _take_as_words(weight, layer) if for_cpu else take_layer(weight, layer)
    matrix = dequantize(weight, x.dtype)
    if for_cpu:
        # Or the dequantization may be fused into a scalar loop over the product.
        matrix = jax.lax.optimization_barrier(matrix)
    # A GPU would take TF32 for float32, and lose half of the digits.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum("ti,oi->to", x, matrix, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(out_dtype or x.dtype)


def _take_as_words(weight: StoredWeight, layer: LayerIndex) -> StoredWeight:
    """`take_layer`, bfloat16 as integers: otherwise it is moved in float32, to which the whole stack is turned first.

    The fence keeps the whole stack from being turned into integers instead, ahead of the loop over layers.
    """
    if isinstance(weight, BlockQuantWeight) or weight.values.dtype != jnp.bfloat16:
        return take_layer(weight, layer)
    values, entry = jax.lax.optimization_barrier((weight.values, jnp.asarray(layer)))
    words = take_layer(DenseWeight(jax.lax.bitcast_convert_type(values, jnp.uint16)), entry)
    return jax.tree.map(lambda leaf: jax.lax.bitcast_convert_type(leaf, jnp.bfloat16), words)


def switch_part(
    weight: MixedWeight, layer: LayerIndex | None, product: Callable[[StoredWeight, jax.Array], jax.Array]
) -> jax.Array:
    """`product` of the part that holds entry `layer`, and where in it; only that one is computed."""
    assert layer is not None  # of a stack
    branches = [functools.partial(product, part) for part in weight.parts]
    out: jax.Array = jax.lax.switch(jnp.asarray(weight.which)[layer], branches, jnp.asarray(weight.at)[layer])
    return out


def normalize(
    x: jax.Array, norm: Norm, layer: LayerIndex | None = None, over: tuple[str, ...] | None = None
) -> jax.Array:
    """RMSNorm over the last axis of x [..., features], in float32, returned in x.dtype.

    `over` names the mesh axes that the features are spread over; then x and the weight are a rank's part of them.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    if over is not None:
        mean_square = jax.lax.pmean(mean_square, over)
    normed = wide * jax.lax.rsqrt(mean_square + np.float32(norm.eps))
    return (normed * of_layer(norm.weight, layer)).astype(x.dtype)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """silu, gelu in its tanh form, or the square of relu."""
    if activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=True)


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """x [tokens, heads, head_dim] rotated in float32, returned in x.dtype."""
    pairs = by.cos.shape[-1]
    cos, sin = by.cos[:, None], by.sin[:, None]
    first, second, rest = jnp.split(x.astype(jnp.float32), (pairs, 2 * pairs), axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def prepare_pages(pools: PoolPair, placement: Placement, first_page: LayerIndex) -> PoolPair:
    """The pools with this step's newly dealt pages cleared in one layer, and its shared pages copied.

    Cleared, so that no request can meet another's K/V; copied, so that none writes into a page that another reads.
    """
    scrub = jnp.where(placement.scrub_pages < 0, -1, placement.scrub_pages + first_page)
    targets = jnp.where(placement.copy_targets < 0, -1, placement.copy_targets + first_page)

    def prepare(pool: jax.Array) -> jax.Array:
        pool = write_rows(pool, scrub, 0)
        return write_rows(pool, targets, pool[placement.copy_sources + first_page])

    return PoolPair(*(prepare(pool) for pool in pools))


def of_layer(stacked: jax.Array, layer: LayerIndex | None) -> jax.Array:
    """Entry `layer` of the first axis; all where it is None."""
    return stacked if layer is None else jax.lax.dynamic_index_in_dim(stacked, layer, axis=0, keepdims=False)
