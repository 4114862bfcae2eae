"""GGUF's blocks, in which scales and quants lie side by side, taken apart into the arrays of a quantized weight.

Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 have blocks of 32. The K kinds have blocks of 256, whose eight parts of 32 (sixteen of
16 in Q6_K) have integers that the block's float16 scale and min are multiplied by. Values stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kv_kernels.weights import BLOCK_SIZE, FORMS, BlockQuantWeight, QuantKind, pack_nibbles

K_BLOCK = 256
_PARTS = K_BLOCK // BLOCK_SIZE

# Quants of a block of 32 are in units of 16 bytes, of which only complex numbers are: numpy copies those whole, and
# single bytes one by one.
_F16, _16_BYTES = np.float16, np.complex128
BLOCKS: dict[QuantKind, np.dtype] = {
    "q8_0": np.dtype([("scales", _F16), ("quants", _16_BYTES, 2)]),
    "q4_0": np.dtype([("scales", _F16), ("quants", _16_BYTES, 1)]),
    "q4_1": np.dtype([("scales", _F16), ("mins", _F16), ("quants", _16_BYTES, 1)]),
    "q5_0": np.dtype([("scales", _F16), ("high_bits", np.uint8, 4), ("quants", _16_BYTES, 1)]),
    "q5_1": np.dtype([("scales", _F16), ("mins", _F16), ("high_bits", np.uint8, 4), ("quants", _16_BYTES, 1)]),
    "q4_k": np.dtype([("scales", _F16), ("mins", _F16), ("factors", np.uint8, 12), ("quants", np.uint8, 128)]),
    "q5_k": np.dtype(
        [
            ("scales", _F16),
            ("mins", _F16),
            ("factors", np.uint8, 12),
            ("high_bits", np.uint8, 32),
            ("quants", np.uint8, 128),
        ]
    ),
    "q6_k": np.dtype(
        [("quants", np.uint8, 128), ("high_bits", np.uint8, 64), ("factors", np.int8, 16), ("scales", _F16)]
    ),
}
"""A block in the file."""


def split_blocks(rows: np.ndarray, kind: QuantKind) -> BlockQuantWeight:
    """Blocks uint8 [*stack, out, bytes] as the parts of a quantized weight (numpy, copied)."""
    blocks = rows.view(BLOCKS[kind])
    return _SPLITS.get(kind, _split_blocks_of_32)(blocks, kind)


def join_blocks(weight: BlockQuantWeight) -> np.ndarray:
    """The rows of an unstacked weight as blocks, uint8 [out, bytes]; of the kinds that have blocks of 32."""
    form = BLOCKS[weight.kind]
    blocks = np.empty(weight.scales.shape, form)
    for name in form.names or ():
        field, part = blocks[name], np.ascontiguousarray(getattr(weight, name))
        field[...] = part.view(field.dtype).reshape(field.shape)
    return blocks.view(np.uint8)


def _split_blocks_of_32(blocks: np.ndarray, kind: QuantKind) -> BlockQuantWeight:
    form = FORMS[kind]
    quants = np.ascontiguousarray(blocks["quants"]).view(np.int8 if form.is_bytes else np.uint8)
    return BlockQuantWeight(
        quants=_flat(quants, blocks),
        scales=np.ascontiguousarray(blocks["scales"]),
        mins=np.ascontiguousarray(blocks["mins"]) if form.has_mins else None,
        kind=kind,
        high_bits=_flat(np.ascontiguousarray(blocks["high_bits"]), blocks) if form.high_bits else None,
    )


def _split_k_with_mins(blocks: np.ndarray, kind: QuantKind) -> BlockQuantWeight:
    """Q4_K and Q5_K. Their values are d * factor * quant - dmin * factor."""
    low, middle, high = np.split(blocks["factors"], 3, axis=-1)
    # Four factors have six bits of a byte of their own; of the other four the upper two lie above those.
    scale_factors = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    min_factors = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    # 32 bytes hold two parts, one in the low nibbles and one in the high ones.
    pairs = blocks["quants"].reshape(*blocks.shape, _PARTS // 2, BLOCK_SIZE)
    quants = np.stack([pack_nibbles(pairs & 15), pack_nibbles(pairs >> 4)], axis=-2)
    bits = None
    if kind == "q5_k":  # bit p of byte j is that of element j of part p
        bits = _pack_bits(blocks["high_bits"][..., None, :] >> np.arange(_PARTS, dtype=np.uint8)[:, None] & 1)
    return BlockQuantWeight(
        quants=_flat(quants, blocks),
        scales=np.ascontiguousarray(blocks["scales"]),
        mins=-blocks["mins"],
        kind=kind,
        high_bits=None if bits is None else _flat(bits, blocks),
        scale_factors=_flat(scale_factors.view(np.int8), blocks),
        min_factors=_flat(min_factors.view(np.int8), blocks),
    )


def _split_q6_k(blocks: np.ndarray, kind: QuantKind) -> BlockQuantWeight:
    # A half of 128: 64 bytes have parts 0 and 1 in the low nibbles and 2 and 3 in the high ones; 32 bytes have two bits
    # of each of the four parts.
    bytes_of_two = blocks["quants"].reshape(*blocks.shape, 2, 2, BLOCK_SIZE)
    quants = np.concatenate([pack_nibbles(bytes_of_two & 15), pack_nibbles(bytes_of_two >> 4)], axis=-2)
    pairs = blocks["high_bits"].reshape(*blocks.shape, 2, 1, BLOCK_SIZE) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    bits = np.stack([_pack_bits(pairs & 1), _pack_bits(pairs >> 1 & 1)], axis=-2)
    return BlockQuantWeight(
        quants=_flat(quants, blocks),
        scales=np.ascontiguousarray(blocks["scales"]),
        mins=None,
        kind=kind,
        high_bits=_flat(bits, blocks),
        scale_factors=_flat(np.ascontiguousarray(blocks["factors"]), blocks),
    )


_SPLITS: dict[QuantKind, Callable[[np.ndarray, QuantKind], BlockQuantWeight]] = {
    "q4_k": _split_k_with_mins,
    "q5_k": _split_k_with_mins,
    "q6_k": _split_q6_k,
}


def _pack_bits(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, axis=-1, bitorder="little")


def _flat(part: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """What the blocks of a row have, one after the other."""
    return part.reshape(*blocks.shape[:-1], -1)
