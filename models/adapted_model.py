"""A loaded model with room for adapters beside its weights: what an engine that has them runs.

The room is zero parameters of fixed shape, `slots * rank` columns for each projection, so that putting an adapter in is
a write into a stack and compiles nothing. Parameters are values here too: `with_adapter` returns new ones, and steps
that are on the device keep theirs.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kv_common.model_spec import ModelSpec
from kv_kernels.adapters import AdapterCapacity
from kv_kernels.tensor_parallel import TensorMesh
from kv_kernels.weights import DenseWeight
from models.assembly import by_path, insert, parameter_shapes
from models.decoder import Decoder
from models.decoder_functions import DecoderFunctions
from models.lora import Adapter, AdapterError, AdapterPair

if TYPE_CHECKING:
    from models.loader import LoadedModel

_IN, _OUT = "adapter_in", "adapter_out"


class AdaptedModel(DecoderFunctions):
    """`base` with room for adapters; everything else about it is the base's, its fingerprint too."""

    def __init__(self, base: LoadedModel, capacity: AdapterCapacity) -> None:
        self.base = base
        self.capacity = capacity
        config = dataclasses.replace(base.decoder.config, adapter_columns=capacity.columns)
        self.decoder = Decoder(config, base.decoder.dtype)
        self.params: dict[str, Any] = self._with_room(base.params)

    @property
    def spec(self) -> ModelSpec:
        return self.base.spec

    @property
    def fingerprint(self) -> bytes:
        return self.base.fingerprint

    @property
    def tensor_mesh(self) -> TensorMesh | None:
        return self.base.tensor_mesh

    def read_adapter(self, directory: str | Path) -> Adapter:
        """The adapter in a directory. Raises what the base's raises, and AdapterError where its rank is beyond the
        room.
        """
        adapter = self.base.read_adapter(directory)
        if adapter.rank > self.capacity.rank:
            raise AdapterError(
                f"{directory} has rank {adapter.rank} and there is room for {self.capacity.rank}: raise "
                "max_adapter_rank"
            )
        return adapter

    def with_adapter(self, params: dict[str, Any], slot: int, adapter: Adapter) -> dict[str, Any]:
        """`params` with `adapter` in a slot, in the place of what was there."""
        start = slot * self.capacity.rank
        written: dict[str, Any] = {}
        for path, weight in by_path(params).items():
            projection, _, last = path.rpartition(".")
            if last in (_IN, _OUT):
                part = self._part(adapter.pairs.get(projection), weight.values, last)
                weight = DenseWeight(_write(weight.values, part, np.int32(start), last, weight.values.sharding))
            insert(written, path, weight)
        return written

    def _part(self, pair: AdapterPair | None, stack: jax.Array, last: str) -> np.ndarray:
        """What goes into one slot of `stack`, in its dtype: zero where the adapter has nothing."""
        axis = _axis(last)
        part = np.zeros([self.capacity.rank if at == axis % 3 else size for at, size in enumerate(stack.shape)], "f4")
        if pair is not None:
            values = pair.into if last == _IN else pair.out
            part[tuple(slice(size) for size in values.shape)] = values
        return part.astype(stack.dtype)

    def _with_room(self, params: dict[str, Any]) -> dict[str, Any]:
        mesh, dtype = self.tensor_mesh, jnp.dtype(self.spec.dtype)
        whole = {**by_path(params)}
        for path, (shape, _, split) in parameter_shapes(self.decoder).items():
            if path in whole:
                continue
            sharding = None if mesh is None else mesh.sharding(mesh.spec_of(split, shape, True))
            make = jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)
            whole[path] = DenseWeight(make())
        tree: dict[str, Any] = {}
        for path in parameter_shapes(self.decoder):
            insert(tree, path, whole[path])
        # A write of nothing, so that what writes is compiled by now and what it returns is what steps are compiled for.
        return self.with_adapter(tree, 0, Adapter(b"", 0, {}))


def _axis(last: str) -> int:
    """The axis of the columns: [layers, columns, in] or [layers, out, columns]."""
    return -2 if last == _IN else -1


@functools.partial(jax.jit, static_argnums=(3, 4))
def _write(stack: jax.Array, part: jax.Array, start: jax.Array, last: str, sharding: Any) -> jax.Array:
    written = lax.dynamic_update_slice_in_dim(stack, part, start, axis=_axis(last))
    return lax.with_sharding_constraint(written, sharding)
