"""Hugging Face checkpoints: one safetensors file, or shards with an index, read by mapping memory.

The header of every file is checked against the file's size before anything is read, so a download cut short is one line
and not a crash in the middle of loading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from models.assembly import CheckpointError
from models.config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_HEADER_LENGTH_BYTES = 8


class _Entry(NamedTuple):
    file: np.ndarray
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsCheckpoint:
    """The tensors of a model directory (see `models.assembly.Checkpoint`).

    Raises:
        CheckpointError: no safetensors, a missing shard, a truncated or malformed file, a tensor type other than
            F32, F16 and BF16.
    """

    def __init__(self, directory: Path) -> None:
        self.origin = str(directory)
        self._entries: dict[str, _Entry] = {}
        placed = _index(directory)
        for path in sorted(set(placed.values())) if placed else [_single(directory)]:
            self._entries |= _read_header(path)
        for name, path in placed.items():
            if name not in self._entries:
                raise CheckpointError(f"{path} lacks {name}, which {INDEX_NAME} places there: get the file again")

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def quantization(self, name: str) -> None:
        """Always dense."""

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        return entry.file[entry.begin : entry.end].view(entry.dtype).reshape(entry.shape)

    def drop(self, name: str) -> None:
        """Forget a tensor that the caller has dealt with."""
        del self._entries[name]


def _index(directory: Path) -> dict[str, Path]:
    """Where the index places each tensor; empty where there is no index."""
    if not (directory / INDEX_NAME).exists():
        return {}
    weight_map = read_json(directory / INDEX_NAME).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(f"{directory / INDEX_NAME} has no weight_map: get the file again")
    placed = {name: directory / file for name, file in weight_map.items()}
    missing = sorted(str(path.name) for path in set(placed.values()) if not path.exists())
    if missing:
        raise CheckpointError(
            f"{directory} lacks the shard {missing[0]} ({len(missing)} of {len(set(placed.values()))} missing): "
            "download it"
        )
    return placed


def _single(directory: Path) -> Path:
    if (directory / SINGLE_NAME).exists():
        return directory / SINGLE_NAME
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{directory} has {len(found)} safetensors files and no {INDEX_NAME}: download the index")
    raise CheckpointError(f"{directory} has no {SINGLE_NAME} and no {INDEX_NAME}: convert the weights to safetensors")


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        file = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"cannot read {path}: {error}") from error
    length = int(file[:_HEADER_LENGTH_BYTES].view("<u8")[0]) if file.size >= _HEADER_LENGTH_BYTES else -1
    start = _HEADER_LENGTH_BYTES + length
    if length < 2 or start > file.size:
        raise CheckpointError(f"{path} is not a safetensors file or is cut short ({file.size} bytes): get it again")
    try:
        header = json.loads(file[_HEADER_LENGTH_BYTES:start].tobytes())
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header ({error}): get the file again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header (not an object): get the file again")
    header.pop("__metadata__", None)
    return {name: _entry(path, file, start, name, field) for name, field in header.items()}


def _entry(path: Path, file: np.ndarray, start: int, name: str, field: Any) -> _Entry:
    try:
        dtype_name, shape = field["dtype"], tuple(int(size) for size in field["shape"])
        begin, end = (start + int(offset) for offset in field["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} has a damaged header (at {name}): get the file again") from error
    if dtype_name not in _DTYPES:
        raise CheckpointError(
            f"{path}: {name} is stored as {dtype_name}, implemented are {', '.join(_DTYPES)}: use an unquantized "
            "checkpoint or a GGUF"
        )
    if end > file.size:
        raise CheckpointError(f"{path} is cut short: {name} ends at byte {end} of {file.size}: get the file again")
    dtype = _DTYPES[dtype_name]
    if begin < start or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: {name} spans {end - begin} bytes, shape {list(shape)} {dtype_name} needs another number"
        )
    return _Entry(file, dtype, shape, begin, end)
