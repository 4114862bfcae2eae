"""Spreading the parameters of a model that is already on one device over the devices of a mesh.

For a model that a mesh is chosen for only when its engine is made; `load_model(..., tensor_parallel=)` gives the same
without ever holding the model in one place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from kv_kernels.tensor_parallel import TensorMesh
from kv_kernels.weights import (
    TILE_ROWS,
    Array,
    BlockQuantWeight,
    DenseWeight,
    MixedWeight,
    StoredWeight,
    take_columns,
    untiled,
)
from models.assembly import ParameterShape, by_path, insert
from models.placement import Index, check_slices, place_slices


def spread_parameters(
    params: Mapping[str, Any], shapes: Mapping[str, ParameterShape], mesh: TensorMesh
) -> dict[str, Any]:
    """The same parameters over `mesh`, every device with what `assemble` would have read for it.

    Raises TensorParallelError where the ranks do not divide a parameter, or would cut a block of a quantized one.
    """
    leaves = by_path(params)
    shardings = {
        path: mesh.sharding(mesh.spec_of(split, shape, is_matrix)) for path, (shape, is_matrix, split) in shapes.items()
    }
    for path, sharding in shardings.items():
        parts = leaves[path].parts if isinstance(leaves[path], MixedWeight) else (leaves[path],)
        quantized = any(isinstance(part, BlockQuantWeight) for part in parts)
        check_slices(path, shapes[path].shape, sharding, quantized)
    spread: dict[str, Any] = {}
    for path, sharding in shardings.items():
        insert(spread, path, _spread(leaves[path], sharding, mesh))
    return spread


def _spread(leaf: Array | StoredWeight | MixedWeight, sharding: NamedSharding, mesh: TensorMesh) -> Any:
    if isinstance(leaf, MixedWeight):
        numbers = [np.asarray(each) for each in (leaf.which, leaf.at)]
        which, at = (place_slices(each.shape, mesh.replicated, each.__getitem__) for each in numbers)
        parts = tuple(_spread(part, sharding, mesh) for part in leaf.parts)
        return dataclasses.replace(leaf, parts=parts, which=which, at=at)
    if isinstance(leaf, DenseWeight):
        return DenseWeight(_spread(leaf.values, sharding, mesh))
    if isinstance(leaf, BlockQuantWeight):
        host = jax.tree.map(np.asarray, leaf)
        shape = (*leaf.stack, leaf.out_features, leaf.in_features)
        return place_slices(shape, sharding, lambda index: cut(host, index))
    return place_slices(leaf.shape, sharding, np.asarray(leaf).__getitem__)


def cut(weight: BlockQuantWeight, index: Index) -> BlockQuantWeight:
    """The slice `index` [*stack, rows, columns] of a weight (numpy), row by row; of columns whole blocks."""
    *stack, rows, columns = index
    first, beyond = rows.start, rows.stop
    if weight.in_tiles:
        # The tiles that hold the rows, so that no more of them than that is laid row by row at a time.
        skipped = first // TILE_ROWS
        rows = slice(skipped, -(-beyond // TILE_ROWS))
        first, beyond = first - skipped * TILE_ROWS, beyond - skipped * TILE_ROWS
    part: BlockQuantWeight = jax.tree.map(lambda part: part[(*stack, rows)], weight)
    if columns.stop - columns.start < weight.in_features:
        part = take_columns(part, columns.start, columns.stop)
    if weight.in_tiles:
        part = jax.tree.map(lambda part: part[..., first:beyond, :], untiled(part))
    return part
