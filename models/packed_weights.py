"""Quantized matrices as Hugging Face checkpoints store them, turned into quantized weights without a change of value.

A module has several tensors in place of its `weight`. Words of 32 bits hold eight numbers of 4 bits, or four of 8, the
first in the lowest bits; which numbers share a word is the format's own. Scales in bfloat16 are held as float32, and
zero points as the product with their scale, which is exact in it for scales of half width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from kv_common.errors import JaxkvError
from kv_kernels.weights import BLOCK_SIZE, BlockQuantWeight, QuantKind, pack_nibbles

Parts = Mapping[str, np.ndarray]
Shape = tuple[int, ...]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns the numbers of a word are."""


class PackedWeightError(JaxkvError):
    """Tensors that do not make up a weight of their format."""


class PackedFormat(NamedTuple):
    """A way of storing matrices: the tensors of a module, the first of which says that it is stored so.

    shape: [out, in] from the shape of that tensor. types: what it may be stored as. unpack: numpy tensors to a weight.
    """

    tensors: tuple[str, ...]
    types: tuple[str, ...]
    kind: QuantKind
    shape: Callable[[Shape], Shape]
    unpack: Callable[[Parts], BlockQuantWeight]


def awq() -> PackedFormat:
    """AWQ's gemm layout: qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]."""

    def unpack(parts: Parts) -> BlockQuantWeight:
        quants, zeros = (_awq_columns(parts[name]) for name in ("qweight", "qzeros"))
        return _four_bits(quants.T, parts["scales"].T, zeros.T)

    return PackedFormat(("qweight", "qzeros", "scales"), ("I32",), "q4_1", lambda each: (8 * each[1], each[0]), unpack)


def gptq(*, symmetric: bool, zero_offset: int) -> PackedFormat:
    """GPTQ: qweight [in/8, out], qzeros [groups, out/8] less `zero_offset`, scales [groups, out], g_idx [in]."""

    def unpack(parts: Parts) -> BlockQuantWeight:
        quants = _numbers(np.ascontiguousarray(parts["qweight"].T), 4)
        scales, zeros = parts["scales"].T, _numbers(parts["qzeros"], 4).T + np.uint8(zero_offset)
        _check_order(parts.get("g_idx"), quants.shape[1], scales.shape[1])
        if symmetric and (zeros != 8).any():
            raise PackedWeightError("has sym true and zero points other than 8: correct its quantization_config")
        return _four_bits(quants, scales, None if symmetric else zeros)

    kind: QuantKind = "q4_0" if symmetric else "q4_1"
    tensors = ("qweight", "qzeros", "scales", "g_idx")
    return PackedFormat(tensors, ("I32",), kind, lambda each: (each[1], 8 * each[0]), unpack)


def packed_integers(bits: int, *, symmetric: bool) -> PackedFormat:
    """compressed-tensors: weight_packed [out, in * bits / 32], raised by half their range, and weight_scale [out,
    groups]; weight_zero_point [out/8, groups], raised likewise, where not symmetric.
    """

    def unpack(parts: Parts) -> BlockQuantWeight:
        quants, scales = _numbers(parts["weight_packed"], bits), parts["weight_scale"]
        _check_order(parts.get("weight_g_idx"), quants.shape[1], scales.shape[1])
        if symmetric and "weight_zero_point" in parts:
            raise PackedWeightError("has symmetric true and zero points: correct its quantization_config")
        if bits == 8:
            return _bytes((quants ^ 0x80).view(np.int8), scales)
        if symmetric:
            return _four_bits(quants, scales, None)
        zeros = _numbers(np.ascontiguousarray(parts["weight_zero_point"].T), 4).T[: len(quants)]
        return _four_bits(quants, scales, zeros)

    kind: QuantKind = "q8_0" if bits == 8 else "q4_0" if symmetric else "q4_1"
    tensors = ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx", "weight_zero_point")
    return PackedFormat(tensors, ("I32",), kind, lambda each: (each[0], each[1] * 32 // bits), unpack)


def plain_bytes(kind: QuantKind, scale_name: str, block: tuple[int, int] | None = None) -> PackedFormat:
    """weight [out, in] int8 or float8 e4m3, and its scales: one, [out, groups], or one for every `block` of both."""

    def unpack(parts: Parts) -> BlockQuantWeight:
        quants, scales = parts["weight"], parts[scale_name]
        if block is not None:
            scales = _of_rows(scales, quants.shape, block)
        elif scales.ndim < 2 or scales.shape[0] == 1:
            scales = np.broadcast_to(scales.reshape(-1, 1), (len(quants), 1))
        return _bytes(quants, scales)

    # Scales of activations are for arithmetic in eight bits, which is not what is done here.
    return PackedFormat(
        ("weight", scale_name, "input_scale", "weight_zero_point"),
        ("I8",) if kind == "q8_0" else ("F8_E4M3",),
        kind,
        lambda each: each,
        unpack,
    )


def _numbers(words: np.ndarray, bits: int) -> np.ndarray:
    """Words int32 [..., n] as their numbers uint8 [..., n * 32 / bits]."""
    numbers = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return numbers
    return np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*numbers.shape[:-1], -1)


def pack_words(quants: np.ndarray) -> np.ndarray:
    """Numbers [out, in], uint8 below 16 or int8, as the words of `packed_integers`."""
    if quants.dtype == np.int8:
        raised: np.ndarray = quants.view(np.uint8) ^ 0x80
        return raised.view(np.int32)
    return np.ascontiguousarray(quants[:, ::2] | quants[:, 1::2] << 4).view(np.int32)


def _awq_columns(words: np.ndarray) -> np.ndarray:
    numbers = _numbers(words, 4).reshape(*words.shape, 8)
    return numbers[..., np.argsort(_AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def _check_order(group_of_input: np.ndarray | None, inputs: int, groups: int) -> None:
    if group_of_input is not None and (group_of_input != np.arange(inputs) // -(-inputs // groups)).any():
        raise PackedWeightError(
            "has inputs in the order of their activations, which is not implemented: use a checkpoint made with "
            "desc_act false"
        )


def _four_bits(quants: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> BlockQuantWeight:
    """quants uint8 [out, in], scales and zeros [out, groups]: values are scale * (quant - zero), zero 8 where None."""
    scales = _checked(quants, _number(scales))
    if zeros is None:
        return BlockQuantWeight(pack_nibbles(quants), scales, None, "q4_0")
    if zeros.shape != scales.shape:
        raise PackedWeightError(f"has {list(zeros.shape)} zero points for {list(scales.shape)} scales: get it again")
    mins = -(scales.astype(np.float32) * zeros)
    return BlockQuantWeight(pack_nibbles(quants), scales, mins, "q4_1")


def _bytes(quants: np.ndarray, scales: np.ndarray) -> BlockQuantWeight:
    if quants.dtype != np.int8 and ((quants.view(np.uint8) & 0x7F) == 0x7F).any():
        raise PackedWeightError("has a weight that is not a number: get the checkpoint again")
    kind: QuantKind = "q8_0" if quants.dtype == np.int8 else "f8_e4m3"
    return BlockQuantWeight(quants, _checked(quants, _number(scales)), None, kind)


def _checked(quants: np.ndarray, scales: np.ndarray) -> np.ndarray:
    outputs, inputs = quants.shape
    groups = scales.shape[-1]
    if scales.shape[0] != outputs or inputs % (groups * BLOCK_SIZE):
        raise PackedWeightError(
            f"has {list(scales.shape)} scales for {outputs} x {inputs} weights, implemented are groups of a multiple "
            f"of {BLOCK_SIZE} inputs that divides them: use another checkpoint of the model"
        )
    return scales


def _number(scales: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scales, np.float32 if scales.dtype == ml_dtypes.bfloat16 else scales.dtype)


def _of_rows(scales: np.ndarray, shape: Shape, block: tuple[int, int]) -> np.ndarray:
    """One scale for every `block` of a matrix of `shape`, as [out, groups]; blocks at the ends may be cut."""
    (outputs, inputs), (rows, columns) = shape, block
    if scales.shape != (-(-outputs // rows), -(-inputs // columns)):
        raise PackedWeightError(
            f"has {list(scales.shape)} scales for {outputs} x {inputs} weights in blocks of {rows} x {columns}: get it "
            "again"
        )
    group = math.gcd(columns, inputs)
    return scales.repeat(rows, axis=0)[:outputs].repeat(columns // group, axis=1)[:, : inputs // group]
