"""From the tensors of a checkpoint to the parameters of a decoder: names and shapes checked first, then stack by stack.

Layers are written one at a time into their stack in its final dtype, which the device takes over where it can, so peak
memory on a CPU is the model and a few parts of a tensor; elsewhere a stack goes to the device before the next is begun.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.tensor_parallel import Split, TensorMesh
from kv_kernels.weights import Array, DenseWeight, MixedWeight
from models.checkpoint import Checkpoint, CheckpointError, is_quantized
from models.config import DecoderConfig
from models.decoder import Decoder
from models.placement import Index, check_slices, place_slices, whole_index
from models.stack_reader import StackReader
from models.weight_memory import WeightMemory


class LoadProgress(NamedTuple):
    """One stack was placed: how many of how many parameters (numbers, not bytes) are in."""

    parameter: str
    done: int
    total: int


ProgressCallback = Callable[[LoadProgress], None]


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
    return {
        path: ParameterShape(value.values.shape, True, split)
        if isinstance(value, DenseWeight)
        else ParameterShape(value.shape, False, split)
        for path, (value, split) in decoder.parameters().items()
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
    share a tensor. `norm_offset` is added to the weight of every norm. Matrices take `dtype` unless quantized, or of 16
    bits under float32; vectors (norms, biases) are few and float32. Over a `mesh`, every slice that a device of this
    process holds is read once and nothing else is.

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
            quantized = any(is_quantized(checkpoint.storage(name)) for name in tensors[path])
            check_slices(path, shape, mesh.sharding(mesh.spec_of(split, shape, is_matrix)), quantized)
    total, done = sum(math.prod(each.shape) for each in shapes.values()), 0
    memory = WeightMemory()
    # Tiles are what a CPU's vectors take, and a slice of a mesh's might cut one.
    in_tiles = mesh is None and jax.default_backend() == "cpu"
    parameters: dict[str, Any] = {}
    for path, (shape, is_matrix, split) in shapes.items():
        order = rows[path].order if path in rows else None
        reader = StackReader(checkpoint, tensors[path], shape[: _stack_depth(names[path])], order, memory, in_tiles)
        if is_matrix:
            parts = [
                _place(
                    (*each.stack, *shape[len(each.stack) :]), split, functools.partial(each.matrix, dtype=dtype), mesh
                )
                for each in reader.by_storage()
            ]
            placed = parts[0] if len(parts) == 1 else _replicate_numbers(reader.mix(parts), mesh)
        else:
            offset = norm_offset if path.endswith("norm.weight") else 0.0
            placed = _place(shape, split, functools.partial(reader.vector, offset=offset), mesh, is_matrix=False)
        insert(parameters, path, placed)
        done += math.prod(shape)
        if progress is not None:
            progress(LoadProgress(path, done, total))
    return parameters


def _place(
    shape: tuple[int, ...],
    split: Split,
    read: Callable[[Index], Any],
    mesh: TensorMesh | None,
    *,
    is_matrix: bool = True,
) -> Any:
    # Waited for, and the host's copy not kept in a variable: two stacks in flight would be two stacks of memory.
    if mesh is None:
        return jax.block_until_ready(jax.device_put(read(whole_index(shape))))
    return place_slices(shape, mesh.sharding(mesh.spec_of(split, shape, is_matrix)), read)


def _replicate_numbers(weight: MixedWeight, mesh: TensorMesh | None) -> MixedWeight:
    """The weight with its two arrays of numbers on every device."""

    def place(numbers: Array) -> jax.Array:
        if mesh is None:
            return jnp.asarray(numbers)
        return jax.make_array_from_callback(numbers.shape, mesh.replicated, lambda index: np.asarray(numbers)[index])

    return dataclasses.replace(weight, which=place(weight.which), at=place(weight.at))


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
