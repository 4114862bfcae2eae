"""From the tensors of a checkpoint to the parameters of a decoder: names and shapes checked first, then stack by stack.

Layers are written one at a time into their stack in its final dtype, and a stack goes to the device before the next is
begun, so peak memory is the model, one stack and one tensor, and one stack's share of the mapped file. Block-quantized
tensors stay quantized where a whole stack has one kind; layers of different kinds are dequantized to the compute dtype,
because re-encoding one would change its values.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kv_common.errors import JaxkvError
from kv_kernels.tensor_parallel import Split, TensorMesh
from kv_kernels.weights import BlockQuantWeight, DenseWeight, QuantKind, dequantize
from models.config import DecoderConfig
from models.decoder import Decoder
from models.placement import Index, check_slices, place_slices, whole_index

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Bytes to which XLA aligns what it computes with on a CPU."""


class CheckpointError(JaxkvError):
    """A checkpoint that cannot be read, or whose tensors are not those the configuration calls for."""


class LoadProgress(NamedTuple):
    """One stack was placed: how many of how many parameters (numbers, not bytes) are in."""

    parameter: str
    done: int
    total: int


ProgressCallback = Callable[[LoadProgress], None]
Tensor = np.ndarray | BlockQuantWeight


class Checkpoint(Protocol):
    """The tensors of one model on disk; nothing is held in memory but what `read` has returned."""

    @property
    def origin(self) -> str:
        """What to call the checkpoint in a message."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def quantization(self, name: str) -> QuantKind | None:
        """How `read` will return it: None is dense."""

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A dense array, or a quantized matrix with numpy parts; only the slice `index` of it, of whole blocks."""

    def release(self) -> None:
        """Let go of the pages of the file that reading has brought in; the arrays it returned are done with."""


class Rows(NamedTuple):
    """The rows of a tensor of `total` rows that make up a parameter: `order` [rows] i64, one for each of its rows."""

    order: np.ndarray
    total: int


def by_path(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts (arrays, weights) by dotted path."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= by_path(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


class ParameterShape(NamedTuple):
    """shape includes the stack of layers; a matrix takes part in products, a vector (norm, bias) does not.

    split: how tensor parallelism may spread it.
    """

    shape: tuple[int, ...]
    is_matrix: bool
    split: Split


def parameter_shapes(decoder: Decoder) -> dict[str, ParameterShape]:
    """Every parameter by its dotted path, in the order of the decoder's tree."""
    state = nnx.split(decoder)[1]
    leaves = by_path(nnx.to_pure_dict(state))
    splits = {
        ".".join(map(str, path)): variable.get_metadata().get("split", "whole")
        for path, variable in nnx.to_flat_state(state)
    }
    return {
        path: ParameterShape(leaf.values.shape, True, splits[path])
        if isinstance(leaf, DenseWeight)
        else ParameterShape(leaf.shape, False, splits[path])
        for path, leaf in leaves.items()
    }


def assemble(
    decoder: Decoder,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    *,
    dtype: str,
    ignored: Sequence[str] = (),
    rows: Mapping[str, Rows] | None = None,
    norm_offset: float = 0.0,
    mesh: TensorMesh | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The decoder's parameters as nested dicts of device arrays and weights, read from `checkpoint`.

    `names` gives every parameter's tensor name template, `rows` the parameters whose rows lie in another order or
    share a tensor. `norm_offset` is added to the weight of every norm. Matrices take `dtype` unless quantized; vectors
    (norms, biases) are few and stay float32. Over a `mesh`, every slice that a device of this process holds is read
    once and nothing else is.

    Raises:
        TensorParallelError: the mesh's ranks do not divide a parameter, or would cut a block of a quantized one.
        CheckpointError: a tensor is missing, extra or misshapen, or does not fit `dtype`; the first one is named.
    """
    shapes = parameter_shapes(decoder)
    rows = rows or {}
    tensors = {path: _tensor_names(names[path], decoder.config) for path in shapes}
    _check_names(checkpoint, tensors, ignored)
    for path, (shape, _, _) in shapes.items():
        wanted = shape[_stack_depth(names[path]) :]
        if path in rows:
            wanted = (rows[path].total, *wanted[1:])
        for name in tensors[path]:
            if checkpoint.shape(name) != wanted:
                raise CheckpointError(
                    f"{checkpoint.origin}: {name} has shape {list(checkpoint.shape(name))}, the configuration "
                    "calls for "
                    f"{list(wanted)}: config and weights do not belong together, get both again"
                )
    if mesh is not None:
        for path, (shape, is_matrix, split) in shapes.items():
            quantized = any(checkpoint.quantization(name) is not None for name in tensors[path])
            check_slices(path, shape, mesh.sharding(mesh.spec_of(split, shape, is_matrix)), quantized)
    total, done = sum(math.prod(each.shape) for each in shapes.values()), 0
    parameters: dict[str, Any] = {}
    for path, (shape, is_matrix, split) in shapes.items():
        order = rows[path].order if path in rows else None
        reader = _StackReader(checkpoint, tensors[path], _stack_depth(names[path]), order)
        offset = norm_offset if path.endswith("norm.weight") else 0.0

        def read(
            index: Index, reader: _StackReader = reader, is_matrix: bool = is_matrix, offset: float = offset
        ) -> DenseWeight | Tensor:
            return reader.matrix(index, dtype) if is_matrix else reader.vector(index, offset)

        # Waited for, and the host's copy not kept in a variable: two stacks in flight would be two stacks of memory.
        if mesh is None:
            placed = jax.block_until_ready(jax.device_put(read(whole_index(shape))))
        else:
            placed = place_slices(shape, mesh.sharding(mesh.spec_of(split, shape, is_matrix)), read)
        checkpoint.release()
        insert(parameters, path, placed)
        done += math.prod(shape)
        if progress is not None:
            progress(LoadProgress(path, done, total))
    return parameters


class _StackReader:
    """Reads the tensors of one parameter, one after the other, into one allocation.

    The first `depth` axes of the parameter count its tensors: layers, or layers and experts, or none.
    """

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], depth: int, row_order: np.ndarray | None) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._depth = depth
        self._row_order = row_order

    def matrix(self, index: Index, dtype: str) -> DenseWeight | BlockQuantWeight:
        """The slice `index` of the stack: quantized if every tensor is, in one kind; else dense in `dtype`."""
        kinds = sorted({self._checkpoint.quantization(name) or "dense" for name in self._names})
        if len(kinds) > 1:
            logger.warning(
                "%s: the layers of %s are stored as %s, so all of them are held as %s",
                *(self._checkpoint.origin, self._names[0], " and ".join(kinds), dtype),
            )
        if len(kinds) > 1 or kinds == ["dense"]:
            return DenseWeight(self.dense(index, dtype))
        part = index[self._depth :]
        first = self._read(self._names[0], part)
        assert isinstance(first, BlockQuantWeight)
        stack = jax.tree.map(lambda part: _empty((len(self._names), *part.shape), part.dtype), first)
        for number, name in enumerate(self._names):
            tensor = self._read(name, part) if number else first
            jax.tree.map(lambda whole, part, number=number: whole.__setitem__(number, part), stack, tensor)
        # Their axes are never cut.
        counts = tuple(each.stop for each in index[: self._depth])
        return jax.tree.map(lambda whole: whole.reshape(*counts, *whole.shape[1:]), stack)

    def dense(self, index: Index, dtype: str) -> np.ndarray:
        """Values of the slice `index` of the stack, in `dtype`."""
        whole = _empty(tuple(each.stop - each.start for each in index), jnp.dtype(dtype))
        targets = whole.reshape(len(self._names), *whole.shape[self._depth :])
        for target, name in zip(targets, self._names, strict=True):
            tensor = self._read(name, index[self._depth :])
            values = np.asarray(dequantize(tensor, "float32")) if isinstance(tensor, BlockQuantWeight) else tensor
            with np.errstate(over="ignore"):  # reported below, by name
                target[...] = values
            if dtype == "float16" and np.isinf(target).any():
                raise CheckpointError(
                    f"{self._checkpoint.origin}: {name} has values beyond float16's 65504: load it as bfloat16 or "
                    "float32"
                )
        return whole

    def vector(self, index: Index, offset: float) -> np.ndarray:
        """Values of the slice `index` in float32, plus `offset`."""
        values = self.dense(index, "float32")
        if offset:
            values += np.float32(offset)
        return values

    def _read(self, name: str, index: Index) -> Tensor:
        if self._row_order is None:
            return self._checkpoint.read(name, index)
        # Rows change places within a head only, so those wanted lie close together.
        rows = self._row_order[index[0]]
        first = int(rows.min())
        tensor = self._checkpoint.read(name, (slice(first, int(rows.max()) + 1), *index[1:]))
        return jax.tree.map(lambda part: part[rows - first], tensor)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that `jax.device_put` takes over on a CPU, where it would copy one that begins anywhere else."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _check_names(checkpoint: Checkpoint, tensors: Mapping[str, Sequence[str]], ignored: Sequence[str]) -> None:
    wanted = {name for names in tensors.values() for name in names}
    present = set(checkpoint.names)
    missing = sorted(wanted - present)
    if missing:
        raise CheckpointError(
            f"{checkpoint.origin} lacks {missing[0]}{_and_others(missing)}: the checkpoint is incomplete, get it again"
        )
    extra = sorted(name for name in present - wanted if not any(re.fullmatch(pattern, name) for pattern in ignored))
    if extra:
        raise CheckpointError(
            f"{checkpoint.origin} has {extra[0]}{_and_others(extra)}, which the configuration does not call for: "
            "config and weights do not belong together, or the model has parts that are not implemented"
        )


def _and_others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _stack_depth(template: str) -> int:
    """How many leading axes of a parameter count tensors."""
    return ("{layer}" in template) + ("{expert}" in template)


def _tensor_names(template: str, config: DecoderConfig) -> list[str]:
    """The names of a parameter's tensors, in the order of its stack."""
    if "{layer}" not in template:
        return [template]
    experts = range(config.experts.count if config.experts is not None and "{expert}" in template else 1)
    return [template.format(layer=layer, expert=expert) for layer in range(config.num_layers) for expert in experts]


def insert(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a leaf into nested dicts at a dotted path."""
    *parents, last = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value
