"""The definition of a quantized weight's value, that every provider must agree with."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kv_kernels.weights import BLOCK_SIZE, FORMS, Array, BlockQuantWeight, DenseWeight, StoredWeight, untiled


def dequantize(weight: StoredWeight, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The values [*stack, out, in], computed in float32 and rounded once to `dtype`."""
    if isinstance(weight, DenseWeight):
        return jnp.asarray(weight.values).astype(dtype)
    weight = untiled(weight)
    runs = weight.in_features // BLOCK_SIZE * max(1, FORMS[weight.kind].block_factors)
    quants = _unpack_quants(weight).astype(jnp.float32)
    values = quants.reshape(*quants.shape[:-1], runs, -1) * _per_run(weight.scales, weight.scale_factors, runs)
    if weight.mins is not None:
        values = values + _per_run(weight.mins, weight.min_factors, runs)
    return values.reshape(quants.shape).astype(dtype)


def _per_run(groups: Array, factors: Array | None, runs: int) -> jax.Array:
    """A group's number times its factors, [*stack, out, runs, 1] f32."""
    numbers = jnp.asarray(groups).astype(jnp.float32)
    if numbers.shape[-1] < runs:
        numbers = jnp.repeat(numbers, runs // numbers.shape[-1], axis=-1)
    if factors is not None:
        numbers = numbers * jnp.asarray(factors).astype(jnp.float32)
    return numbers[..., None]


def _unpack_quants(weight: BlockQuantWeight) -> jax.Array:
    """Quants [*stack, out, in], offset taken off: int8, or float8."""
    form, quants = FORMS[weight.kind], jnp.asarray(weight.quants)
    if form.is_bytes:
        return quants
    blocks = weight.in_features // BLOCK_SIZE
    packed = quants.reshape(*quants.shape[:-1], blocks, BLOCK_SIZE // 2)
    unpacked = jnp.concatenate([packed & 0xF, packed >> 4], axis=-1)
    if weight.high_bits is not None:
        words = jnp.asarray(weight.high_bits).reshape(*quants.shape[:-1], blocks, form.high_bits, BLOCK_SIZE // 8, 1)
        bits = (words >> jnp.arange(8, dtype=jnp.uint8) & 1).reshape(*words.shape[:-2], BLOCK_SIZE)
        unpacked = unpacked | functools.reduce(
            jnp.bitwise_or, (bits[..., bit, :] << (4 + bit) for bit in range(form.high_bits))
        )
    return (unpacked.astype(jnp.int8) - jnp.int8(form.offset)).reshape(*quants.shape[:-1], weight.in_features)
