"""One parameter of a model read from its tensors, one after the other, into one allocation for a stack of layers.

Tensors that are quantized stay so, and those of 16 bits a number do where every such number is one of the compute
dtype. Where layers are quantized in different ways each way has a stack of its own, because to encode one again would
change its values.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, DenseWeight, MixedWeight, can_be_tiled, tiled
from models.checkpoint import Checkpoint, CheckpointError, Tensor, is_quantized
from models.placement import Index
from models.weight_memory import WeightMemory

logger = logging.getLogger(__name__)

_CHUNK_NUMBERS = 1 << 20
"""Numbers of a dense tensor that are read at once."""


@dataclasses.dataclass(frozen=True)
class StackReader:
    """Reads the tensors `names` of a parameter, whose first axes, of sizes `stack`, count them: layers, or layers and
    experts, or none. `row_order` [rows] are the tensors' rows that make up the parameter's; None for all as they are.
    `in_tiles`: quantized weights that can be are laid in tiles.
    """

    checkpoint: Checkpoint
    names: Sequence[str]
    stack: tuple[int, ...]
    row_order: np.ndarray | None
    memory: WeightMemory
    in_tiles: bool

    def by_storage(self) -> list[StackReader]:
        """Readers of the entries of the first axis that are stored in one way, in the order of their first ones."""
        return [
            dataclasses.replace(self, names=[self.names[at] for at in self._tensors_of(entries)], stack=stack)
            for entries in self._entries_by_kind().values()
            for stack in [(len(entries), *self.stack[1:]) if self.stack else ()]
        ]

    def mix(self, parts: Sequence[DenseWeight | BlockQuantWeight]) -> MixedWeight:
        """What the readers of `by_storage` have read as one stack; which and at are numpy."""
        which, at = np.zeros((2, self.stack[0]), np.int32)
        for number, entries in enumerate(self._entries_by_kind().values()):
            which[entries], at[entries] = number, np.arange(len(entries))
        return MixedWeight(tuple(parts), which, at)

    def _entries_by_kind(self) -> dict[str, list[int]]:
        count = self.stack[0] if self.stack else 1
        kinds: dict[str, list[int]] = {}
        for entry in range(count):
            stored = {self._kind(self.names[at]) for at in self._tensors_of([entry])}
            kinds.setdefault(stored.pop() if len(stored) == 1 else "dense", []).append(entry)
        return kinds

    def _kind(self, name: str) -> str:
        storage = self.checkpoint.storage(name)
        return storage if is_quantized(storage) else "dense"

    def _tensors_of(self, entries: Sequence[int]) -> list[int]:
        """Numbers of the tensors of entries of the first axis."""
        each = math.prod(self.stack[1:])
        return [entry * each + number for entry in entries for number in range(each)]

    def matrix(self, index: Index, dtype: str) -> DenseWeight | BlockQuantWeight:
        """The slice `index` of the stack: quantized if every tensor is, in one kind; else dense for a compute dtype of
        `dtype`.
        """
        # By all of its tensors, so that every device's slice is of one kind.
        kinds = sorted({self._kind(name) for name in self.names})
        if len(kinds) > 1:
            logger.warning(
                "%s: the experts of %s are stored as %s, so all of them are held as %s",
                *(self.checkpoint.origin, self.names[0], " and ".join(kinds), dtype),
            )
        if len(kinds) > 1 or kinds == ["dense"]:
            return DenseWeight(self._dense(index, self._held(dtype)))
        names, part = self._names_in(index), index[len(self.stack) :]
        stack, form = None, None
        for number, name in enumerate(names):
            tensor = self._read(name, part)
            assert isinstance(tensor, BlockQuantWeight)
            form = form or _form(tensor)
            if _form(tensor) != form:
                raise CheckpointError(
                    f"{self.checkpoint.origin}: {name} is quantized with {_form(tensor)}, {names[0]} with {form}: "
                    "layers that differ in that are not implemented, quantize the model anew"
                )
            if self.in_tiles and can_be_tiled(tensor):
                tensor = tiled(tensor)
            if stack is None:
                stack = jax.tree.map(lambda part: self.memory.empty((len(names), *part.shape), part.dtype), tensor)
            jax.tree.map(lambda whole, part, number=number: whole.__setitem__(number, part), stack, tensor)
            del tensor
            self.checkpoint.release()
        counts = [each.stop - each.start for each in index[: len(self.stack)]]
        return jax.tree.map(lambda whole: whole.reshape(*counts, *whole.shape[1:]), stack)

    def _held(self, dtype: str) -> str:
        """The dtype of dense numbers that are computed with in `dtype`."""
        stored = {self.checkpoint.storage(name) for name in self.names}
        # Every number of 16 bits is one of 32: they would be twice as many bytes for each step to read.
        return stored.pop() if dtype == "float32" and stored in ({"bfloat16"}, {"float16"}) else dtype

    def _names_in(self, index: Index) -> list[str]:
        """The tensors of a slice, in its order."""
        numbers = np.arange(len(self.names)).reshape(self.stack)[index[: len(self.stack)]]
        return [self.names[number] for number in numbers.reshape(-1).tolist()]

    def _dense(self, index: Index, dtype: str) -> np.ndarray:
        """Values of the slice `index` of the stack, in `dtype`."""
        whole = self.memory.empty(tuple(each.stop - each.start for each in index), jnp.dtype(dtype))
        names = self._names_in(index)
        targets = whole.reshape(len(names), *whole.shape[len(self.stack) :])
        for target, name in zip(targets, names, strict=True):
            rows, *rest = index[len(self.stack) :]
            step = max(1, _CHUNK_NUMBERS // math.prod(target.shape[1:]))
            for first in range(0, len(target), step):
                some = slice(rows.start + first, min(rows.start + first + step, rows.stop))
                tensor = self._read(name, (some, *rest))
                values = np.asarray(dequantize(tensor, "float32")) if isinstance(tensor, BlockQuantWeight) else tensor
                part = target[first : first + step]
                with np.errstate(over="ignore"):  # reported below, by name
                    part[...] = values
                if dtype == "float16" and (np.isinf(part) & np.isfinite(values)).any():
                    raise CheckpointError(
                        f"{self.checkpoint.origin}: {name} has values beyond float16's 65504: load it as bfloat16 or "
                        "float32"
                    )
                self.checkpoint.release()
        return whole

    def vector(self, index: Index, offset: float) -> np.ndarray:
        """Values of the slice `index` in float32, plus `offset`."""
        values = self._dense(index, "float32")
        if offset:
            values += np.float32(offset)
        return values

    def _read(self, name: str, index: Index) -> Tensor:
        if self.row_order is None:
            return self.checkpoint.read(name, index)
        # Rows change places within a head only, so those wanted lie close together.
        rows = self.row_order[index[0]]
        first = int(rows.min())
        tensor = self.checkpoint.read(name, (slice(first, int(rows.max()) + 1), *index[1:]))
        return jax.tree.map(lambda part: part[rows - first], tensor)


def _form(tensor: BlockQuantWeight) -> str:
    """What the numbers beside the quants are, for people."""
    return ", ".join(
        f"{name} {part.dtype} in {part.shape[-1]} groups"
        for name, part in (("scales", tensor.scales), ("mins", tensor.mins))
        if part is not None
    )
