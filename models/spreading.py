"""Spreading the parameters of a model that is already on one device over the devices of a mesh.

For a model that a mesh is chosen for only when its engine is made; `load_model(..., tensor_parallel=)` gives the same
without ever holding the model in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from kv_kernels.tensor_parallel import TensorMesh
from kv_kernels.weights import BlockQuantWeight
from models.assembly import ParameterShape, by_path, insert
from models.placement import check_slices


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
        check_slices(path, shapes[path].shape, sharding, isinstance(leaves[path], BlockQuantWeight))
    spread: dict[str, Any] = {}
    for path, sharding in shardings.items():
        insert(spread, path, jax.tree.map(lambda part, to=sharding: _spread(part, to), leaves[path]))
    return spread


def _spread(part: jax.Array, sharding: NamedSharding) -> jax.Array:
    whole = np.asarray(part)
    return jax.block_until_ready(jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index]))
