"""Dense matrices rounded to blocks of 32, the way ggml does it: the scale follows from the block's extremes alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kv_kernels.weights import BLOCK_SIZE, FORMS, BlockQuantWeight, QuantKind, pack_nibbles

KINDS: tuple[QuantKind, ...] = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Kinds that a matrix can be rounded to, the finest first."""


class RoundedRows(NamedTuple):
    """quants [out, in], int8 for q8_0 and else uint8; scales [out, in/32] float16; mins the same, or None."""

    quants: np.ndarray
    scales: np.ndarray
    mins: np.ndarray | None


@np.errstate(over="ignore", invalid="ignore")
def round_rows(values: np.ndarray, kind: QuantKind) -> RoundedRows:
    """values [out, in], `in` whole blocks, rounded to one of KINDS. A scale beyond float16 becomes infinite, that of a
    block with a nan becomes nan.
    """
    form = FORMS[kind]
    blocks = np.asarray(values, np.float32).reshape(len(values), -1, BLOCK_SIZE)
    mins = None
    if form.is_bytes:
        scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        quants = _half_away_from_zero(blocks * _inverse(scales)).astype(np.int8)
    else:
        levels = 16 << form.high_bits
        if form.has_mins:
            mins = blocks.min(axis=-1, keepdims=True)
            scales = (blocks.max(axis=-1, keepdims=True) - mins) / np.float32(levels - 1)
            blocks = blocks - mins
        else:  # the number of largest size is exact at one end of the range
            largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
            scales = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-form.offset)
        steps = blocks * _inverse(scales) + np.float32(form.offset + 0.5)
        quants = np.trunc(steps).clip(0, levels - 1).astype(np.uint8)
    return RoundedRows(
        quants.reshape(values.shape),
        scales[..., 0].astype(np.float16),
        None if mins is None else mins[..., 0].astype(np.float16),
    )


def pack_rows(rows: RoundedRows, kind: QuantKind) -> BlockQuantWeight:
    """Rounded rows as a weight with numpy parts."""
    form = FORMS[kind]
    return BlockQuantWeight(
        quants=rows.quants if form.is_bytes else pack_nibbles(rows.quants & 15),
        scales=rows.scales,
        mins=rows.mins,
        kind=kind,
        high_bits=np.packbits(rows.quants >> 4, axis=-1, bitorder="little") if form.high_bits else None,
    )


def _inverse(scales: np.ndarray) -> np.ndarray:
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def _half_away_from_zero(values: np.ndarray) -> np.ndarray:
    size = np.abs(values)
    whole = np.floor(size)
    return np.sign(values) * (whole + np.floor(2 * (size - whole)))
