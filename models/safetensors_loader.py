"""Hugging Face checkpoints: one safetensors file, or shards with an index.

The safetensors library checks every file's header against its size on opening, so a download cut short is one line and
not a crash in the middle of loading. Numbers are read from where the header says, a tensor or a slice at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from kv_kernels.weights import DenseDtype
from models.checkpoint import CheckpointError
from models.config_fields import read_json
from models.placement import Index

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

FLOAT_TYPES: dict[str, DenseDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
PACKED_TYPES = tuple(name for name in _DTYPES if name not in FLOAT_TYPES)
_LENGTH_BYTES = 8


class _Stored(NamedTuple):
    """Where a tensor lies: `begin` counts bytes of the file."""

    path: Path
    type: str
    shape: tuple[int, ...]
    begin: int


class SafetensorsCheckpoint:
    """The tensors of a model directory (see `models.checkpoint.Checkpoint`).

    Raises:
        CheckpointError: no safetensors, a missing shard, a truncated or malformed file, a tensor of a type that is
            not among `types`.
    """

    def __init__(self, directory: Path, types: Collection[str] = FLOAT_TYPES) -> None:
        self.origin = str(directory)
        self._tensors: dict[str, _Stored] = {}
        placed = _index(directory)
        for path in sorted(set(placed.values())) if placed else [_single(directory)]:
            found = _tensors_of(path, types)
            for name in (name for name, where in placed.items() if where == path):
                if name not in found:
                    raise CheckpointError(f"{path} lacks {name}, which {INDEX_NAME} places there: get the file again")
            # A second copy, where the index does not place it, is not read.
            self._tensors |= {name: stored for name, stored in found.items() if placed.get(name, path) == path}

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored_type(self, name: str) -> str:
        """As the file calls it."""
        return self._tensors[name].type

    def storage(self, name: str) -> DenseDtype:
        return FLOAT_TYPES[self.stored_type(name)]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """The rows that `index` asks for are read, and not mapped: pages of a mapping would count as memory."""
        stored = self._tensors[name]
        dtype, shape = _DTYPES[stored.type], stored.shape
        first = 0
        if index:
            first, shape = index[0].start, (index[0].stop - index[0].start, *shape[1:])
        begin = stored.begin + first * math.prod(shape[1:]) * dtype.itemsize
        data = np.fromfile(stored.path, dtype, math.prod(shape), offset=begin)
        if data.size != math.prod(shape):
            raise CheckpointError(f"{stored.path} was cut short while it was read ({name}): get it again")
        data = data.reshape(shape)
        return data[:, *index[1:]] if index else data

    def release(self) -> None:
        """Nothing is held."""

    def drop(self, name: str) -> None:
        """Forget a tensor that the caller has dealt with."""
        del self._tensors[name]


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


def _tensors_of(path: Path, types: Collection[str]) -> dict[str, _Stored]:
    """The tensors of a file; the library compares its header with its size."""
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(size))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except SafetensorError as error:
        reason = " ".join(str(error).split()).removeprefix("Error while deserializing header: ")
        raise CheckpointError(
            f"{path} is not a safetensors file, or is damaged or cut short ({path.stat().st_size} bytes; {reason}): "
            "get it again"
        ) from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not name.isprintable():
            raise CheckpointError(f"{path} is damaged (the name {name!r}): get it again")
        if entry["dtype"] not in types:
            raise CheckpointError(
                f"{path}: {name} is stored as {entry['dtype']}, implemented are {', '.join(types)}: use an unquantized "
                "checkpoint or a GGUF"
            )
    data = _LENGTH_BYTES + size
    return {
        name: _Stored(path, entry["dtype"], tuple(entry["shape"]), data + entry["data_offsets"][0])
        for name, entry in header.items()
    }
