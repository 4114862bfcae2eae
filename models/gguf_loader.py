"""A GGUF file as a checkpoint: quantized matrices stay so, F32, F16 and BF16 are dense."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from pathlib import Path

import numpy as np

from kv_kernels.weights import take_columns
from models.checkpoint import Storage, Tensor, is_quantized
from models.gguf_blocks import BLOCKS, split_blocks
from models.gguf_file import read_gguf
from models.placement import Index, whole_index

_STORAGE: dict[str, Storage] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    **{kind.upper(): kind for kind in BLOCKS},
}


class GgufCheckpoint:
    """The tensors of a GGUF file (see `models.checkpoint.Checkpoint`), and the `file`.

    Raises:
        CheckpointError, UnsupportedModelError: see `models.gguf_file.read_gguf`.
    """

    def __init__(self, path: Path) -> None:
        self.origin = str(path)
        self.file = read_gguf(path)

    @property
    def names(self) -> Collection[str]:
        return self.file.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[name].shape

    def storage(self, name: str) -> Storage:
        return _STORAGE[self.file.tensors[name].storage.name]

    def read(self, name: str, index: Index | None = None) -> Tensor:
        tensor = self.file.tensors[name]
        storage = self.storage(name)
        index = whole_index(tensor.shape) if index is None else index
        if not is_quantized(storage):
            return tensor.data.view(storage).reshape(tensor.shape)[index]
        *rows, columns = index
        size, width = tensor.storage.block_size, tensor.storage.block_bytes
        data = tensor.data.reshape(*tensor.shape[:-1], -1)
        first, last = columns.start // size, -(-columns.stop // size)
        part = split_blocks(data[(*rows, slice(first * width, last * width))], storage)
        return take_columns(part, columns.start - first * size, columns.stop - first * size)

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self.file.mapping.madvise(mmap.MADV_DONTNEED)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """The values of a small tensor, such as RoPE frequency factors; None where there is none of that name."""
        if name not in self.file.tensors:
            return None
        return tuple(np.asarray(self.read(name), np.float64).reshape(-1).tolist())
