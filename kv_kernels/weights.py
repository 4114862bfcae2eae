"""Weights as pytrees: dense, or block-quantized the way GGUF and other checkpoints store them.

Every product with a weight goes through a provider's `linear`, so this module holds layout and nothing that multiplies:
indexing, sizes and places. `kv_kernels.dequantize` says what a quantized weight's values are.
Leading `stack` axes (layers) come first, so that a layer index is an operand and no layer is ever sliced out by the
caller.

Quantized rows are split in blocks of 32 along `in`. A value is scale * (quant - offset), or scale * quant + min, where
scales and mins are numbers of groups of blocks, times an integer of the block in the kinds that have two levels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_SIZE = 32
"""Elements of a block: no group is smaller, and slices along `in` have whole ones."""

TILE_ROWS = 16
"""Rows of a weight in tiles that lie together."""

QuantKind = Literal["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "f8_e4m3"]
DenseDtype = Literal["float32", "bfloat16", "float16"]
Array = jax.Array | np.ndarray
LayerIndex = int | jax.Array


class QuantForm(NamedTuple):
    """What a kind's quants are: bytes, or nibbles with `high_bits` bits above them, less `offset`.

    block_factors: integers of a block that its group's scale is multiplied by (0: none), and its group's min.
    """

    is_bytes: bool = False
    high_bits: int = 0
    offset: int = 0
    has_mins: bool = False
    block_factors: int = 0


FORMS: dict[QuantKind, QuantForm] = {
    "q8_0": QuantForm(is_bytes=True),
    "q4_0": QuantForm(offset=8),
    "q4_1": QuantForm(has_mins=True),
    "q5_0": QuantForm(high_bits=1, offset=16),
    "q5_1": QuantForm(high_bits=1, has_mins=True),
    "q4_k": QuantForm(has_mins=True, block_factors=1),
    "q5_k": QuantForm(high_bits=1, has_mins=True, block_factors=1),
    "q6_k": QuantForm(high_bits=2, offset=32, block_factors=2),
    "f8_e4m3": QuantForm(is_bytes=True),
}


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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["quants", "scales", "mins", "high_bits", "scale_factors", "min_factors"],
    meta_fields=["kind", "in_tiles"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BlockQuantWeight:
    """A quantized weight, its parts apart; those that its kind has not are None.

    quants int8 or float8_e4m3fn [*stack, out, in], or nibbles uint8 [*stack, out, in/2]: byte j of a block's 16 holds
    element j in the low nibble and element j+16 in the high one. scales, mins float16 or float32 [*stack, out, groups],
    where `groups` divides in/32. high_bits uint8 [*stack, out, in/32 * 4 * bits]: for every block and bit, the lower
    bit first, 32 bits from the lowest of the first byte on. scale_factors, min_factors int8 [*stack, out, in/32], or
    in/16 where each half of a block has its own.

    in_tiles: sixteen rows lie together, as a CPU's vectors take them; see `tiled`.
    """

    quants: Array
    scales: Array
    mins: Array | None
    kind: QuantKind
    high_bits: Array | None = None
    scale_factors: Array | None = None
    min_factors: Array | None = None
    in_tiles: bool = False

    @property
    def out_features(self) -> int:
        return self.quants.shape[-2] * (TILE_ROWS if self.in_tiles else 1)

    @property
    def in_features(self) -> int:
        row_bytes = self.quants.shape[-1] // (TILE_ROWS if self.in_tiles else 1)
        return row_bytes * (1 if FORMS[self.kind].is_bytes else 2)

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(self.quants.shape[:-2])

    @property
    def nbytes(self) -> int:
        return _nbytes(self)


StoredWeight = DenseWeight | BlockQuantWeight


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts", "which", "at"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class MixedWeight:
    """A stack whose entries are stored in different ways: entry i is entry at[i] of parts[which[i]].

    which, at [entries] i32, along the first axis of the stack; the parts differ in its size and in nothing else.
    """

    parts: tuple[StoredWeight, ...]
    which: Array
    at: Array

    @property
    def out_features(self) -> int:
        return self.parts[0].out_features

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def stack(self) -> tuple[int, ...]:
        return (self.which.shape[0], *self.parts[0].stack[1:])

    @property
    def nbytes(self) -> int:
        return _nbytes(self)


Weight = StoredWeight | MixedWeight


def flatten_stack(weight: Weight) -> Weight:
    """A stack [a, b, ...] as [a * b, ...]."""
    if not isinstance(weight, MixedWeight):
        return _flat(weight)
    count = weight.stack[1]
    at = jnp.asarray(weight.at)[:, None] * count + jnp.arange(count)
    return MixedWeight(tuple(map(_flat, weight.parts)), jnp.repeat(weight.which, count), at.reshape(-1))


def _flat(weight: StoredWeight) -> StoredWeight:
    flat: StoredWeight = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weight)
    return flat


def take_layer(weight: StoredWeight, layer: LayerIndex) -> StoredWeight:
    """Entry `layer` of the first stack axis; `layer` may be traced. XLA may copy the entry."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, axis=0, keepdims=False), weight)


def take_rows(weight: StoredWeight, rows: Array) -> StoredWeight:
    """Rows `rows` [n] int of an unstacked weight [out, in], as a weight [n, in]; out of range is clamped."""
    if isinstance(weight, BlockQuantWeight) and weight.in_tiles:
        # The tiles that they are in, of which every row but one is dropped again.
        rows = jnp.clip(jnp.asarray(rows), 0, weight.out_features - 1)
        tiles = untiled(jax.tree.map(lambda leaf: jnp.take(leaf, rows // TILE_ROWS, axis=0)[:, None], weight))
        return jax.tree.map(lambda leaf: leaf[jnp.arange(len(rows)), rows % TILE_ROWS], tiles)
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), weight)


def take_columns(weight: BlockQuantWeight, start: int, stop: int) -> BlockQuantWeight:
    """Columns [start, stop) of every row, whole blocks. `start` is a multiple of their number, as in slices of equal
    length; groups that such slices cut become smaller ones, of the same size in all of them.
    """
    in_features = weight.in_features

    def cut(part: Array) -> Array:
        each = in_features // part.shape[-1] if part.shape[-1] < in_features else 1
        finer = math.gcd(each, stop - start)
        part = part.repeat(each // finer, axis=-1) if finer < each else part
        return part[..., start * part.shape[-1] // in_features : stop * part.shape[-1] // in_features]

    return jax.tree.map(cut, weight)


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """Numbers below 16, uint8 [..., in], as the quants [..., in/2] of a weight."""
    halves = values.reshape(*values.shape[:-1], -1, 2, BLOCK_SIZE // 2)
    packed: np.ndarray = halves[..., 0, :] | halves[..., 1, :] << 4
    return packed.reshape(*values.shape[:-1], -1)


def can_be_tiled(weight: BlockQuantWeight) -> bool:
    """Whether `tiled` takes it: four bits and no more, a float16 for every block, and rows in sixteens."""
    form, blocks = FORMS[weight.kind], weight.in_features // BLOCK_SIZE
    numbers = (weight.scales,) if weight.mins is None else (weight.scales, weight.mins)
    return (
        weight.out_features % TILE_ROWS == 0
        and not (form.is_bytes or form.high_bits or form.block_factors)
        and all(each.dtype == np.float16 and each.shape[-1] == blocks for each in numbers)
    )


def tiled(weight: BlockQuantWeight) -> BlockQuantWeight:
    """The same weight (numpy) in tiles of 16 rows: quants [*stack, out/16, in/2 * 16], scales and mins [*stack, out/16,
    in/32 * 16].

    A tile has, for every block, the 16 bytes of quants of each row and apart from them the scale and the min of each
    row. The quants of four rows that are four apart follow each other, so that a vector of 64 bytes has them.
    """
    *stack, out_features, row_bytes = weight.quants.shape
    tiles, blocks = out_features // TILE_ROWS, row_bytes // 16
    # In units of 16 bytes, of which only complex numbers are.
    quants = np.ascontiguousarray(weight.quants).view(np.complex128).reshape(*stack, tiles, 4, 4, blocks)
    quants = np.ascontiguousarray(np.moveaxis(quants, (-1, -2), (-3, -2)))

    def numbers(rows: Array) -> np.ndarray:
        by_row = np.asarray(rows).reshape(*stack, tiles, TILE_ROWS, blocks)
        return np.ascontiguousarray(by_row.swapaxes(-1, -2)).reshape(*stack, tiles, -1)

    return dataclasses.replace(
        weight,
        quants=quants.view(np.uint8).reshape(*stack, tiles, -1),
        scales=numbers(weight.scales),
        mins=None if weight.mins is None else numbers(weight.mins),
        in_tiles=True,
    )


def untiled(weight: BlockQuantWeight) -> BlockQuantWeight:
    """A weight in tiles, row by row again; one that is so already as it is."""
    if not weight.in_tiles:
        return weight
    *stack, tiles, _ = weight.quants.shape
    blocks = weight.in_features // BLOCK_SIZE
    rows = (*stack, tiles * TILE_ROWS)

    def numbers(by_block: Array) -> Array:
        return by_block.reshape(*stack, tiles, blocks, TILE_ROWS).swapaxes(-1, -2).reshape(*rows, blocks)

    quants = weight.quants.reshape(*stack, tiles, blocks, 4, 4, BLOCK_SIZE // 2)
    axes = (*range(len(stack)), *(len(stack) + axis for axis in (0, 3, 2, 1, 4)))
    return dataclasses.replace(
        weight,
        quants=quants.transpose(*axes).reshape(*rows, -1),
        scales=numbers(weight.scales),
        mins=None if weight.mins is None else numbers(weight.mins),
        in_tiles=False,
    )


def _nbytes(weight: Weight) -> int:
    # Not leaf.nbytes: abstract leaves (ShapeDtypeStruct) have none.
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(weight))
