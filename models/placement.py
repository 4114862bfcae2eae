"""Placing parameters on the devices of a mesh, slice by slice, and knowing them by content where they lie.

A process reads each distinct slice that its devices hold once, and hands it to all of them; no whole stack is ever in
one place. What a mesh cannot hold is refused before anything is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from kv_kernels.peers import together
from kv_kernels.tensor_parallel import TensorMesh, TensorParallelError, tensor_mesh
from kv_kernels.weights import BLOCK_SIZE
from models.config import DecoderConfig

Index = tuple[slice, ...]
"""One slice for each axis, with start and stop."""


Bounds = tuple[tuple[int, int], ...]
"""Start and stop for each axis: an index that can be a key."""


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def whole_index(shape: tuple[int, ...]) -> Index:
    return tuple(slice(0, size) for size in shape)


def mesh_for(config: DecoderConfig, tensor_parallel: int | Mesh) -> TensorMesh | None:
    """The mesh to spread a decoder over; None for one device.

    Raises:
        TensorParallelError: see `tensor_mesh`; or the width does not divide the query heads or the MLP, or an axis for
            experts does not divide those.
    """
    mesh = tensor_mesh(tensor_parallel, config.num_kv_heads)
    for number, what in ((config.num_heads, "query heads"), (config.intermediate_size, "features of the MLP")):
        if mesh is not None and number % mesh.width:
            raise TensorParallelError(
                f"{number} {what} cannot spread over {mesh.width} devices: choose a tensor_parallel that divides them"
            )
    if mesh is not None and config.experts is not None and config.experts.count % mesh.expert_shards:
        raise TensorParallelError(
            f"{config.experts.count} experts cannot spread over an axis of {mesh.expert_shards} devices: choose "
            "one that divides them"
        )
    return mesh


def check_slices(path: str, shape: tuple[int, ...], sharding: NamedSharding, quantized: bool) -> None:
    """Refuse slices that would cut a block of a quantized parameter in two. Raises TensorParallelError."""
    inputs = sharding.shard_shape(shape)[-1]
    if quantized and inputs != shape[-1] and inputs % BLOCK_SIZE:
        raise TensorParallelError(
            f"{path} has {shape[-1]} inputs in blocks of {BLOCK_SIZE}, and {shape[-1] // inputs} devices would hold "
            f"{inputs} each, which cuts a block: choose another tensor_parallel, or a file that is not quantized"
        )


def place_slices(shape: tuple[int, ...], sharding: NamedSharding, read: Callable[[Index], Any]) -> Any:
    """A parameter of `shape` on the devices of `sharding`; `read` gives a slice of it as a pytree of host arrays.

    A part of a quantized weight has fewer columns than `shape` says, and is spread in the same proportion.
    """
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(_bounds(index, shape), []).append(device)
    pieces: list[list[jax.Array]] = []
    for bounds, devices in holders.items():
        part = read(tuple(slice(*each) for each in bounds))
        leaves, structure = jax.tree.flatten(part)
        pieces = pieces or [[] for _ in leaves]
        for placed, leaf in zip(pieces, leaves, strict=True):
            placed += [jax.device_put(leaf, device) for device in devices]
        jax.block_until_ready(pieces)
        del part, leaves, leaf  # or two slices would be on the host at once
    times = [size // local for size, local in zip(shape, sharding.shard_shape(shape), strict=True)]
    whole = [
        jax.make_array_from_single_device_arrays(
            tuple(size * count for size, count in zip(placed[0].shape, times, strict=True)), sharding, placed
        )
        for placed in pieces
    ]
    return jax.tree.unflatten(structure, whole)


def update_with_content(digest: _Digest, array: jax.Array) -> None:
    """Add every bit of `array` to a digest.

    Of a spread array the slices are digested one by one, each by a process that holds it, so that no process needs
    all of it and all of them agree.
    """
    if array.is_fully_replicated:
        digest.update(_bytes(np.asarray(array)))
        return
    bounds_of = {
        device: _bounds(index, array.shape) for device, index in array.sharding.devices_indices_map(array.shape).items()
    }
    order = {bounds: number for number, bounds in enumerate(sorted(set(bounds_of.values())))}
    digests = np.zeros((len(order), 32), np.uint8)
    done: set[int] = set()
    for shard in array.addressable_shards:
        number = order[bounds_of[shard.device]]
        if number not in done:
            done.add(number)
            content = hashlib.blake2b(_bytes(np.asarray(shard.data)), digest_size=32).digest()
            digests[number] = np.frombuffer(content, np.uint8)
    if not array.is_fully_addressable:
        # Zeros where a process does not hold a slice, and the same digest wherever one does.
        with together("the load", jax.process_count()):
            digests = np.asarray(multihost_utils.process_allgather(digests)).max(axis=0)
    digest.update(digests.tobytes())


def _bounds(index: Index | None, shape: tuple[int, ...]) -> Bounds:
    return tuple(each.indices(size)[:2] for each, size in zip(index or (), shape, strict=True))


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
