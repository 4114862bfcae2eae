"""Checkpoint files written tensor by tensor: sizes are known beforehand, so a header goes first and nothing is kept."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from models.gguf_file import DEFAULT_ALIGNMENT, MAGIC, STORAGE_TYPES, GgufFile

_TYPE_IDS = {storage.name: number for number, storage in STORAGE_TYPES.items()}
_WORD = 4  # GGUF's number for metadata of uint32
_GUESSED_FILE_TYPE = 1024
_QUANTIZATION_VERSION = 2


class TensorSpec(NamedTuple):
    """A tensor to be written; `type` as its file format calls it."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


class Planned(NamedTuple):
    """Tensors that are made together, when their turn comes, as arrays of as many bytes."""

    tensors: tuple[TensorSpec, ...]
    make: Callable[[], Sequence[np.ndarray]]


Wrote = Callable[[TensorSpec], None]


def storage_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a GGUF tensor."""
    storage = STORAGE_TYPES[_TYPE_IDS[type_name]]
    return math.prod(shape) // storage.block_size * storage.block_bytes


def write_safetensors(path: Path, planned: Sequence[Planned], wrote: Wrote) -> None:
    """One safetensors file; `wrote` is called after each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in _specs(planned):
        end = offset + spec.nbytes
        header[spec.name] = {"dtype": spec.type, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        _write_data(file, planned, 1, wrote)


def write_gguf(path: Path, source: GgufFile, planned: Sequence[Planned], wrote: Wrote) -> None:
    """A GGUF file with the metadata of `source`, byte for byte but for what says how tensors are stored."""
    stated = {"general.file_type": _GUESSED_FILE_TYPE, "general.quantization_version": _QUANTIZATION_VERSION}
    pairs = [bytes(source.mapping[where]) for key, where in source.pairs.items() if key not in stated]
    pairs += [_string(key) + struct.pack("<II", _WORD, value) for key, value in stated.items()]
    alignment = source.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    infos, offset = [], 0
    for spec in _specs(planned):
        sizes = struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *reversed(spec.shape))
        infos.append(_string(spec.name) + sizes + struct.pack("<IQ", _TYPE_IDS[spec.type], offset))
        offset += -(-spec.nbytes // alignment) * alignment
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos))
        _write_data(file, planned, alignment, wrote)


def _specs(planned: Iterable[Planned]) -> Iterable[TensorSpec]:
    return (spec for each in planned for spec in each.tensors)


def _write_data(
    file: IO[bytes], planned: Sequence[Planned], alignment: int, wrote: Callable[[TensorSpec], None]
) -> None:
    for each in planned:
        for spec, data in zip(each.tensors, each.make(), strict=True):
            assert data.nbytes == spec.nbytes, (spec, data.nbytes)
            file.write(b"\0" * (-file.tell() % alignment))
            file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            wrote(spec)
    file.write(b"\0" * (-file.tell() % alignment))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
