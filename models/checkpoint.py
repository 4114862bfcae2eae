"""What a checkpoint is to the code that assembles a model from it, whatever its files are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeGuard

import numpy as np

from kv_common.errors import JaxkvError
from kv_kernels.weights import FORMS, BlockQuantWeight, DenseDtype, QuantKind
from models.placement import Index

Tensor = np.ndarray | BlockQuantWeight
Storage = QuantKind | DenseDtype


def is_quantized(storage: Storage) -> TypeGuard[QuantKind]:
    return storage in FORMS


class CheckpointError(JaxkvError):
    """A checkpoint that cannot be read, or whose tensors are not those the configuration calls for."""


class Checkpoint(Protocol):
    """The tensors of one model on disk; nothing is held in memory but what `read` has returned."""

    @property
    def origin(self) -> str:
        """What to call the checkpoint in a message."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def storage(self, name: str) -> Storage:
        """How `read` will return it: quantized, or dense with numbers of this dtype."""

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A dense array, or a quantized matrix with numpy parts; only the slice `index` of it, of whole blocks."""

    def release(self) -> None:
        """Let go of the pages of the file that reading has brought in; the arrays it returned are done with."""
