"""Gated MLPs of a mixture's experts: two grouped products, a program for each tile of pairs and block of features.

A program reads the rows of its pairs where they lie, and its expert's matrix out of the stack of all, as stored: blocks
of a quantized weight are dequantized on the way, in float32 and rounded to the activations' dtype. Products have one
shape for tiles of any width and go through `in` in one order, so a row's sums are its own. Programs of padding do
nothing.
"""

from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kv_kernels.composition import activate
from kv_kernels.experts import MAX_TILE
from kv_kernels.pallas.softmax import MIN_PRODUCT, divide
from kv_kernels.provider import Activation, Tiles
from kv_kernels.weights import BLOCK_SIZE, FORMS, BlockQuantWeight, StoredWeight, Weight

OUT_BLOCK = 64
IN_BLOCK_BYTES = 128

# mypy: disable-error-code="no-untyped-def"
# Refs, the arguments of kernels, have no public type.


def can_group(weight: Weight) -> TypeGuard[StoredWeight]:
    """Whether the kernel reads `weight`: dense or of a kind of integers, all entries in one way, row by row.

    Arrays of bytes between 2 and 4 GiB are left out: Triton's offsets there are 32 bits wide and signed.
    """
    if isinstance(weight, BlockQuantWeight) and (weight.in_tiles or weight.kind == "f8_e4m3"):
        return False
    return isinstance(weight, StoredWeight) and not any(
        leaf.dtype.itemsize == 1 and 2**31 < leaf.size <= 2**32 for leaf in jax.tree.leaves(weight)
    )


def grouped_mlp(
    x: jax.Array,
    gate: StoredWeight,
    up: StoredWeight,
    down: StoredWeight,
    tiles: Tiles,
    k: int,
    *,
    activation: Activation,
    interpret: bool,
) -> jax.Array:
    """`KernelProvider.grouped_mlp` of weights that `can_group`."""
    pairs = x.shape[0] * k
    wide = jnp.zeros((pairs, gate.out_features), x.dtype)
    wide = _grouped(x, (gate, up), tiles, wide, k=k, activation=activation, interpret=interpret)
    # Nothing is written for a pair in no tile.
    out = jnp.zeros((pairs, down.out_features), jnp.float32)
    return _grouped(wide, (down,), tiles, out, k=1, activation=None, interpret=interpret)


def _grouped(
    x: jax.Array,
    weights: tuple[StoredWeight, ...],
    tiles: Tiles,
    out: jax.Array,
    *,
    k: int,
    activation: Activation | None,
    interpret: bool,
) -> jax.Array:
    """Row p // k of x times an entry of every weight, and of two of them activation(first) * second, at row p of `out`
    [pairs, out], for every pair p in a tile.
    """
    num_tiles, width = tiles.pair.shape
    pairs, out_features = out.shape
    in_features = x.shape[1]
    out_block = min(OUT_BLOCK, max(MIN_PRODUCT, pl.next_power_of_2(out_features)))
    in_block = min(IN_BLOCK_BYTES // x.dtype.itemsize, max(MIN_PRODUCT, pl.next_power_of_2(in_features)))

    def jaxkv_grouped_product(entry_ref, pair_ref, used_ref, x_ref, weight_refs, _out, out_ref):
        tile = pl.program_id(0)
        lane = lax.iota(jnp.int32, MAX_TILE)
        pair = plgpu.load(pair_ref.at[tile, lane], mask=lane < width, other=pairs)
        pair = pair[:, None]
        real, row = pair < pairs, divide(pair, k)
        feature = pl.program_id(1) * out_block + lax.iota(jnp.int32, out_block)
        inside = (feature < out_features)[:, None]
        entry = entry_ref[tile]

        def add_block(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            column = index * in_block + lax.broadcasted_iota(jnp.int32, (1, in_block), 1)
            held = column < in_features
            rows = plgpu.load(x_ref.at[row, column], mask=real & held, other=0)
            return tuple(
                total + _product(rows, _values(weight, entry, feature[:, None], column, inside & held))
                for total, weight in zip(sums, weight_refs, strict=True)
            )

        empty = tuple(jnp.zeros((MAX_TILE, out_block), jnp.float32) for _ in weight_refs)
        blocks = jnp.where(tile < used_ref[0], pl.cdiv(in_features, in_block), 0)
        sums = lax.fori_loop(0, blocks, add_block, empty)
        result = sums[0] if activation is None else activate(sums[0], activation) * sums[1]
        where = out_ref.at[pair, feature[None, :]]
        plgpu.store(where, result.astype(out.dtype), mask=real & inside.T)

    operands = (tiles.entry, tiles.pair, tiles.used.reshape(1), x, weights, out)
    return pl.pallas_call(
        jaxkv_grouped_product,
        grid=(num_tiles, pl.cdiv(out_features, out_block)),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(*operands)


def _values(weight: StoredWeight, entry, row, column, mask) -> jax.Array:
    """The values of entry `entry` at row [out, 1] and column [1, in], as `dequantize` defines them; 0 off the mask."""

    def load(part, at):
        return plgpu.load(part.at[entry, row, at], mask=mask, other=0)

    if not isinstance(weight, BlockQuantWeight):
        return load(weight.values, column)
    form, in_features = FORMS[weight.kind], weight.in_features
    block, place = divide(column, BLOCK_SIZE), column & (BLOCK_SIZE - 1)

    def numbers(groups, factors) -> jax.Array:
        by_group, *by_run = (
            load(part, divide(column, in_features // part.shape[-1])).astype(jnp.float32)
            for part in (groups, factors)
            if part is not None
        )
        return by_group * by_run[0] if by_run else by_group

    if form.is_bytes:
        quant = load(weight.quants, column).astype(jnp.int32)
    else:
        half = BLOCK_SIZE // 2
        byte = load(weight.quants, block * half + (place & (half - 1))).astype(jnp.int32)
        quant = (byte >> (4 * divide(place, half))) & 0xF
        for bit in range(form.high_bits):
            word = load(weight.high_bits, (block * form.high_bits + bit) * 4 + divide(place, 8)).astype(jnp.int32)
            quant |= ((word >> (place & 7)) & 1) << (4 + bit)
        quant -= form.offset
    values = quant.astype(jnp.float32) * numbers(weight.scales, weight.scale_factors)
    return values if weight.mins is None else values + numbers(weight.mins, weight.min_factors)


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """rows [pairs, in] times matrix [out, in] transposed, in the dtype of rows; exact for float32 too, where the
    default is TF32.
    """
    return lax.dot_general(
        *(rows, matrix.astype(rows.dtype), (((1,), (1,)), ((), ()))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
