"""The GGUF container: metadata as plain values, tensors as mapped bytes. Versions 2 and 3, little-endian.

Parsed here and not by the gguf package, which takes seconds over a vocabulary's strings and reports damage as
whatever numpy raises; tests hold the two equal. Every length is checked against the file's size before it is believed.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models.checkpoint import CheckpointError
from models.config import UnsupportedModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 8


class StorageType(NamedTuple):
    """block_bytes hold block_size elements."""

    name: str
    block_size: int
    block_bytes: int


STORAGE_TYPES = {
    0: StorageType("F32", 1, 4),
    1: StorageType("F16", 1, 2),
    2: StorageType("Q4_0", 32, 18),
    3: StorageType("Q4_1", 32, 20),
    6: StorageType("Q5_0", 32, 22),
    7: StorageType("Q5_1", 32, 24),
    8: StorageType("Q8_0", 32, 34),
    12: StorageType("Q4_K", 256, 144),
    13: StorageType("Q5_K", 256, 176),
    14: StorageType("Q6_K", 256, 210),
    30: StorageType("BF16", 1, 2),
}
# Names only, so that a file in one of these is refused by name.
_OTHER_TYPES = {
    **{
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        15: "Q8_K",
        16: "IQ2_XXS",
    },
    **{
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
    },
    **{26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


class GgufTensor(NamedTuple):
    """shape is row-major ([out, in]); data uint8 [rows, bytes per row], mapped from the file."""

    storage: StorageType
    shape: tuple[int, ...]
    data: np.ndarray


class GgufFile(NamedTuple):
    """metadata holds numbers, strings and lists, by key; tensors by name, in the mapping of the whole file.

    pairs: where each key and its value lie in the file, for those who write them again.
    """

    metadata: dict[str, Any]
    pairs: dict[str, slice]
    tensors: dict[str, GgufTensor]
    mapping: mmap.mmap


class _CutShort(Exception):
    """A length points past the end of the file."""


class _Damaged(Exception):
    """A value that no writer writes."""


def read_gguf(path: Path) -> GgufFile:
    """Parse `path`; tensors are mapped, not read.

    Raises:
        CheckpointError: unreadable, not GGUF, cut short or damaged.
        UnsupportedModelError: a version or a tensor's storage type is not implemented.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"cannot read {path}: {error}") from error
    data = np.frombuffer(mapping, np.uint8)
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file (it begins with {data[:4].tobytes()!r}): check the path")
    cursor = _Cursor(data, len(MAGIC))
    try:
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{path} is GGUF version {version:#x}, implemented are 2 and 3, little-endian: convert it"
            )
        tensor_count, pair_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata: dict[str, Any] = {}
        pairs: dict[str, slice] = {}
        for _ in range(pair_count):
            begin = cursor.offset
            key = cursor.name()
            metadata[key] = cursor.value(cursor.scalar("<I"))
            pairs[key] = slice(begin, cursor.offset)
        infos = [_TensorInfo.read(cursor) for _ in range(tensor_count)]
    except _CutShort as error:
        raise CheckpointError(f"{path} is cut short ({data.size} bytes end inside its header): get it again") from error
    except (_Damaged, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error} at byte {cursor.offset}): get it again") from error
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path} is damaged (general.alignment is {alignment!r}): get it again")
    start = -(-cursor.offset // alignment) * alignment
    return GgufFile(metadata, pairs, {info.name: _map_tensor(path, data, start, info) for info in infos}, mapping)


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: np.ndarray, offset: int) -> None:
        self._view = data.data
        self.offset = offset

    def scalar(self, format: str) -> Any:
        try:
            (value,) = struct.unpack_from(format, self._view, self.offset)
        except struct.error as error:
            raise _CutShort from error
        self.offset += struct.calcsize(format)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        begin, self.offset = self.offset, self.offset + length
        if self.offset > len(self._view):
            raise _CutShort
        return str(self._view[begin : self.offset], "utf-8")

    def _strings(self, count: int) -> list[str]:
        # As `count` times `string`, without its calls: a vocabulary has a hundred thousand of them.
        view, offset, end, strings = self._view, self.offset, len(self._view), []
        for _ in range(count):
            begin = offset + _LENGTH.size
            if begin > end:
                raise _CutShort
            offset = begin + _LENGTH.unpack_from(view, offset)[0]
            if offset > end:
                raise _CutShort
            self.offset = offset
            strings.append(str(view[begin:offset], "utf-8"))
        return strings

    def name(self) -> str:
        """A string that messages can repeat."""
        text = self.string()
        if not text.isprintable():
            raise _Damaged(f"the name {text!r}")
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.scalar("<I"), self.scalar("<Q")
            if item == _STRING:
                return self._strings(length)
            if item not in _SCALARS:
                raise _Damaged(f"an array of value type {item}")
            begin, self.offset = self.offset, self.offset + length * struct.calcsize(_SCALARS[item])
            if self.offset > len(self._view):
                raise _CutShort
            return [each for (each,) in struct.iter_unpack(_SCALARS[item], self._view[begin : self.offset])]
        if kind not in _SCALARS:
            raise _Damaged(f"value type {kind}")
        return self.scalar(_SCALARS[kind])


class _TensorInfo(NamedTuple):
    name: str
    dimensions: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, cursor: _Cursor) -> _TensorInfo:
        name, count = cursor.name(), cursor.scalar("<I")
        if count > _MAX_DIMENSIONS:
            raise _Damaged(f"{count} dimensions")
        dimensions = tuple(cursor.scalar("<Q") for _ in range(count))
        return cls(name, dimensions, cursor.scalar("<I"), cursor.scalar("<Q"))


def _map_tensor(path: Path, data: np.ndarray, start: int, info: _TensorInfo) -> GgufTensor:
    storage = STORAGE_TYPES.get(info.kind)
    if storage is None:
        raise UnsupportedModelError(
            f"{path}: {info.name} is stored as {_OTHER_TYPES.get(info.kind, f'type {info.kind}')}, implemented are "
            f"{', '.join(each.name for each in STORAGE_TYPES.values())}: use a file in one of those, such as the "
            "model's Q8_0"
        )
    shape = tuple(reversed(info.dimensions)) or (1,)
    if shape[-1] % storage.block_size:
        raise CheckpointError(
            f"{path} is damaged ({info.name}: rows of {shape[-1]} in blocks of {storage.block_size}): get it again"
        )
    row_bytes, rows = shape[-1] // storage.block_size * storage.block_bytes, math.prod(shape[:-1])
    begin = start + info.offset
    end = begin + rows * row_bytes
    if end > data.size:
        raise CheckpointError(f"{path} is cut short: {info.name} ends at byte {end} of {data.size}: get it again")
    return GgufTensor(storage, shape, data[begin:end].reshape(rows, row_bytes))
