"""Hugging Face checkpoints: one safetensors file, or shards with an index.

The safetensors library maps every file and checks its header against its size on opening, so a download cut short is
one line and not a crash in the middle of loading. A tensor is copied into memory by `read`, one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # the library reads BF16 through it, and does not import it
import numpy as np
from safetensors import SafetensorError, safe_open

from models.checkpoint import CheckpointError
from models.config_fields import read_json
from models.placement import Index

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

FLOAT_TYPES = ("F32", "F16", "BF16")
FLOAT8_TYPE = "F8_E4M3"


class SafetensorsCheckpoint:
    """The tensors of a model directory (see `models.assembly.Checkpoint`).

    Raises:
        CheckpointError: no safetensors, a missing shard, a truncated or malformed file, a tensor of a type that is
            not among `types`.
    """

    def __init__(self, directory: Path, types: Collection[str] = FLOAT_TYPES) -> None:
        self.origin = str(directory)
        self._types = types
        self._headers: dict[Path, dict[str, Any]] = {}
        self._paths: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        placed = _index(directory)
        for path in sorted(set(placed.values())) if placed else [_single(directory)]:
            self._files[path] = _open(path, types)
            self._paths |= dict.fromkeys(self._files[path].keys(), path)
        for name, path in placed.items():
            if name not in self._paths:
                raise CheckpointError(f"{path} lacks {name}, which {INDEX_NAME} places there: get the file again")

    @property
    def names(self) -> Collection[str]:
        return self._paths.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def stored_type(self, name: str) -> str:
        return str(self._file_of(name).get_slice(name).get_dtype())

    def quantization(self, name: str) -> None:
        """Always dense."""

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        if self.stored_type(name) == FLOAT8_TYPE:
            whole = self._read_float8(name)
            return whole if index is None else whole[index]
        if index is None:
            return self._file_of(name).get_tensor(name)
        return self._file_of(name).get_slice(name)[index]

    def release(self) -> None:
        # The library unmaps a file when its object goes, and not before.
        self._files.clear()

    def drop(self, name: str) -> None:
        """Forget a tensor that the caller has dealt with."""
        del self._paths[name]

    def _read_float8(self, name: str) -> np.ndarray:
        """What the library cannot give as numpy: its bytes, from where the header of its file says."""
        path = self._paths[name]
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if path not in self._headers:
                self._headers[path] = json.loads(file.read(size))
            begin, end = self._headers[path][name]["data_offsets"]
            file.seek(8 + size + begin)
            return np.fromfile(file, ml_dtypes.float8_e4m3fn, end - begin).reshape(self.shape(name))

    def _file_of(self, name: str) -> Any:
        path = self._paths[name]
        if path not in self._files:
            self._files[path] = _open(path, self._types)
        return self._files[path]


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


def _open(path: Path, types: Collection[str]) -> Any:
    try:
        file = safe_open(path, framework="numpy")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except SafetensorError as error:
        reason = " ".join(str(error).split()).removeprefix("Error while deserializing header: ")
        raise CheckpointError(
            f"{path} is not a safetensors file, or is damaged or cut short ({path.stat().st_size} bytes; {reason}): "
            "get it again"
        ) from error
    for name in file.keys():  # noqa: SIM118 - the file is no mapping
        dtype = file.get_slice(name).get_dtype()
        if not name.isprintable():
            raise CheckpointError(f"{path} is damaged (the name {name!r}): get it again")
        if dtype not in types:
            raise CheckpointError(
                f"{path}: {name} is stored as {dtype}, implemented are {', '.join(types)}: use an unquantized "
                "checkpoint or a GGUF"
            )
    return file
