"""Hugging Face checkpoints: one safetensors file, or shards with an index.

The safetensors library maps every file and checks its header against its size on opening, so a download cut short is
one line and not a crash in the middle of loading. A tensor is copied into memory by `read`, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from models.assembly import CheckpointError
from models.config_fields import read_json
from models.placement import Index

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The library reads BF16 through ml_dtypes, which has to be imported for numpy to know the name.
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class SafetensorsCheckpoint:
    """The tensors of a model directory (see `models.assembly.Checkpoint`).

    Raises:
        CheckpointError: no safetensors, a missing shard, a truncated or malformed file, a tensor type other than
            F32, F16 and BF16.
    """

    def __init__(self, directory: Path) -> None:
        self.origin = str(directory)
        self._paths: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        placed = _index(directory)
        for path in sorted(set(placed.values())) if placed else [_single(directory)]:
            self._files[path] = _open(path)
            self._paths |= dict.fromkeys(self._files[path].keys(), path)
        for name, path in placed.items():
            if name not in self._paths:
                raise CheckpointError(f"{path} lacks {name}, which {INDEX_NAME} places there: get the file again")

    @property
    def names(self) -> Collection[str]:
        return self._paths.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def quantization(self, name: str) -> None:
        """Always dense."""

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        if index is None:
            return self._file_of(name).get_tensor(name)
        return self._file_of(name).get_slice(name)[index]

    def release(self) -> None:
        # The library unmaps a file when its object goes, and not before.
        self._files.clear()

    def drop(self, name: str) -> None:
        """Forget a tensor that the caller has dealt with."""
        del self._paths[name]

    def _file_of(self, name: str) -> Any:
        path = self._paths[name]
        if path not in self._files:
            self._files[path] = _open(path)
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


def _open(path: Path) -> Any:
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
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: {name} is stored as {dtype}, implemented are {', '.join(_DTYPES)}: use an unquantized "
                "checkpoint or a GGUF"
            )
    return file
