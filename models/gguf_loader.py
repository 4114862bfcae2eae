"""A GGUF file as a checkpoint: Q8_0, Q4_0 and Q4_1 stay quantized, F32, F16 and BF16 are dense."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kv_kernels.weights import BlockQuantWeight, QuantKind
from models.assembly import Tensor
from models.gguf_file import read_gguf
from models.placement import Index, whole_index

_DENSE = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_KINDS: dict[str, QuantKind] = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}

# One block in the file. Quants are in units of 16 bytes, of which only complex numbers are: numpy copies those whole,
# and single bytes one by one.
_BLOCKS = {
    "q8_0": np.dtype([("scales", np.float16), ("quants", np.complex128, 2)]),
    "q4_0": np.dtype([("scales", np.float16), ("quants", np.complex128, 1)]),
    "q4_1": np.dtype([("scales", np.float16), ("mins", np.float16), ("quants", np.complex128, 1)]),
}


class GgufCheckpoint:
    """The tensors of a GGUF file (see `models.assembly.Checkpoint`) and its `metadata`.

    Raises:
        CheckpointError, UnsupportedModelError: see `models.gguf_file.read_gguf`.
    """

    def __init__(self, path: Path) -> None:
        self.origin = str(path)
        file = read_gguf(path)
        self.metadata: dict[str, Any] = file.metadata
        self._tensors = file.tensors
        self._mapping = file.mapping

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def quantization(self, name: str) -> QuantKind | None:
        return _KINDS.get(self._tensors[name].storage.name)

    def read(self, name: str, index: Index | None = None) -> Tensor:
        tensor = self._tensors[name]
        kind = self.quantization(name)
        index = whole_index(tensor.shape) if index is None else index
        if kind is None:
            return tensor.data.view(_DENSE[tensor.storage.name]).reshape(tensor.shape)[index]
        *rows, columns = index
        size, width = tensor.storage.block_size, tensor.storage.block_bytes
        data = tensor.data.reshape(*tensor.shape[:-1], -1)
        part = data[(*rows, slice(columns.start // size * width, columns.stop // size * width))]
        return split_blocks(part, kind)

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """The values of a small tensor, such as RoPE frequency factors; None where there is none of that name."""
        if name not in self._tensors:
            return None
        return tuple(np.asarray(self.read(name), np.float64).reshape(-1).tolist())


def split_blocks(rows: np.ndarray, kind: QuantKind) -> BlockQuantWeight:
    """GGUF's interleaved blocks, uint8 [*stack, out, bytes], as the parts of a quantized weight (numpy, copied)."""
    blocks = rows.view(_BLOCKS[kind])
    quants = np.ascontiguousarray(blocks["quants"]).view(np.int8 if kind == "q8_0" else np.uint8)
    return BlockQuantWeight(
        quants=quants.reshape(*rows.shape[:-1], -1),
        scales=np.ascontiguousarray(blocks["scales"]),
        mins=np.ascontiguousarray(blocks["mins"]) if kind == "q4_1" else None,
        kind=kind,
    )
