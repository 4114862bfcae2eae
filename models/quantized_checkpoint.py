"""Hugging Face checkpoints whose matrices are quantized: the tensors of a module are read together, as its weight.

A matrix is read whole and then cut, since its columns may lie in words with others; one at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from kv_kernels.weights import take_columns
from models.checkpoint import CheckpointError, Storage, Tensor
from models.config import ModelConfigError
from models.packed_weights import PackedFormat, PackedWeightError
from models.placement import Index
from models.quantization_config import packed_format
from models.safetensors_loader import FLOAT_TYPES, PACKED_TYPES, SafetensorsCheckpoint


def open_checkpoint(directory: Path, quantization: Any) -> SafetensorsCheckpoint | QuantizedCheckpoint:
    """The checkpoint of a directory whose config.json has this `quantization_config`, None for none.

    Raises:
        CheckpointError, ModelConfigError, UnsupportedModelError: see the classes and `packed_format`.
    """
    if not quantization:
        return SafetensorsCheckpoint(directory)
    if not isinstance(quantization, dict):
        raise ModelConfigError(f"{directory / 'config.json'} has a quantization_config that is no object: fix the file")
    form = packed_format(quantization)
    return QuantizedCheckpoint(SafetensorsCheckpoint(directory, (*FLOAT_TYPES, *PACKED_TYPES)), form)


class QuantizedCheckpoint:
    """The tensors of a directory (see `models.checkpoint.Checkpoint`), those that make up a matrix as its `weight`.

    Raises:
        CheckpointError: no matrix is stored in the format, or a tensor is neither part of one nor of a float type.
    """

    def __init__(self, tensors: SafetensorsCheckpoint, form: PackedFormat) -> None:
        self.origin = tensors.origin
        self._tensors = tensors
        self._form = form
        first = f".{form.tensors[0]}"
        stems = [
            name.removesuffix(first)
            for name in tensors.names
            if name.endswith(first) and tensors.stored_type(name) in form.types
        ]
        if not stems:
            raise CheckpointError(
                f"{self.origin} has no {first[1:]} of type {' or '.join(form.types)}, which its quantization_config "
                "calls for: correct the configuration"
            )
        self._parts = {
            f"{stem}.weight": {part: f"{stem}.{part}" for part in form.tensors if f"{stem}.{part}" in tensors.names}
            for stem in stems
        }
        parts = {name for each in self._parts.values() for name in each.values()}
        self._dense = {name for name in tensors.names if name not in parts}
        for name in sorted(self._dense):
            if tensors.stored_type(name) not in FLOAT_TYPES:
                raise CheckpointError(
                    f"{self.origin}: {name} is stored as {tensors.stored_type(name)} and is no part of a matrix that "
                    "the quantization_config calls for: use another checkpoint of the model"
                )

    @property
    def names(self) -> Collection[str]:
        return self._dense | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._dense:
            return self._tensors.shape(name)
        return self._form.shape(self._tensors.shape(self._parts[name][self._form.tensors[0]]))

    def storage(self, name: str) -> Storage:
        return self._tensors.storage(name) if name in self._dense else self._form.kind

    def read(self, name: str, index: Index | None = None) -> Tensor:
        if name in self._dense:
            return self._tensors.read(name, index)
        try:
            weight = self._form.unpack({part: self._tensors.read(full) for part, full in self._parts[name].items()})
        except KeyError as error:
            missing = name.removesuffix("weight") + error.args[0]
            raise CheckpointError(
                f"{self.origin} lacks {missing}: the checkpoint is incomplete, get it again"
            ) from error
        except PackedWeightError as error:
            raise CheckpointError(f"{self.origin}: {name} {error}") from error
        if index is None:
            return weight
        rows, columns = index
        return take_columns(jax.tree.map(lambda part: part[rows], weight), columns.start, columns.stop)

    def release(self) -> None:
        self._tensors.release()

    def drop(self, name: str) -> None:
        """Forget a tensor that the caller has dealt with."""
        self._dense.discard(name)
        self._parts.pop(name, None)
