"""Tensor parallelism: the mesh of devices that one model and its K/V pools are spread over.

Contract: two mesh axes together are the tensor axis, in row-major order: `kv_head_shard` by K/V heads, and
`kv_head_replica` over the devices that hold the same K/V head, where there are more devices than heads. So rank i finds
K/V head i // replicas beside its query heads, and one mesh serves parameters and pools. A mesh may have more axes:
everything is replicated over those, and only the tensor axes are manual, so that a data or an expert axis finds its
place beside them. An axis named `expert` is manual too: every device of it holds some of a mixture's experts and all of
the rest. XLA cannot partition a kernel's custom call, so the network runs in one manual region, in which
every device sees its own heads and the only collectives are those that `StepView` writes down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv_common.errors import JaxkvError

KV_HEAD_SHARD = "kv_head_shard"
KV_HEAD_REPLICA = "kv_head_replica"
TENSOR_AXES = (KV_HEAD_SHARD, KV_HEAD_REPLICA)
EXPERT = "expert"

POOL_SPEC = PartitionSpec(None, None, KV_HEAD_SHARD, None)
"""Pools [pages of all layers, tokens_per_page, kv_heads, head_dim]."""

Split = Literal["whole", "outputs", "kv_outputs", "inputs", "vocabulary", "expert_outputs", "expert_inputs"]
"""How a parameter is spread: its output features over all ranks, over ranks of different K/V heads (for K and V), its
input features, or its output features where they divide (the vocabulary). A stack [layers, experts, out, in] is spread
by experts besides, where the mesh has an axis for them."""


class TensorParallelError(JaxkvError):
    """A width that the model or the devices cannot be spread over."""


class TensorAxes(NamedTuple):
    """Sizes of the two tensor axes."""

    shards: int
    replicas: int


@dataclass(frozen=True)
class TensorMesh:
    """A mesh that has both tensor axes."""

    mesh: Mesh

    @property
    def axes(self) -> TensorAxes:
        return TensorAxes(*(self.mesh.shape[name] for name in TENSOR_AXES))

    @property
    def width(self) -> int:
        """Ranks that the heads are spread over."""
        return self.axes.shards * self.axes.replicas

    @property
    def expert_shards(self) -> int:
        """Devices that the experts of a mixture are spread over; 1 without an axis for them."""
        shards: int = self.mesh.shape.get(EXPERT, 1)
        return shards

    @property
    def num_processes(self) -> int:
        return len({device.process_index for device in self.mesh.devices.flat})

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @property
    def replicated(self) -> NamedSharding:
        return self.sharding(PartitionSpec())

    def manual(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` run by every rank on its own part; specs name tensor axes and EXPERT only."""
        mapped: Callable[..., Any] = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={*TENSOR_AXES, EXPERT} & set(self.mesh.axis_names),
            check_vma=False,  # kernels' custom calls say nothing about what varies
        )
        return mapped

    def spec_of(self, split: Split, shape: tuple[int, ...], is_matrix: bool) -> PartitionSpec:
        """Where a parameter of `shape` goes: a matrix [*stack, out, in], or a vector [*stack, out]."""
        out_axis = len(shape) - (2 if is_matrix else 1)
        axis = len(shape) - 1 if split in ("inputs", "expert_inputs") else out_axis
        if split == "whole" or (split == "vocabulary" and shape[axis] % self.width):
            return PartitionSpec()
        names = (KV_HEAD_SHARD,) if split == "kv_outputs" else TENSOR_AXES
        spec = [names if at == axis else None for at in range(len(shape))]
        if split in ("expert_outputs", "expert_inputs") and self.expert_shards > 1:
            spec[1] = (EXPERT,)
        return PartitionSpec(*spec)


def tensor_mesh(tensor_parallel: int | Mesh, num_kv_heads: int) -> TensorMesh | None:
    """The mesh of a width, on the first devices of every process, or the user's own; None for a width of 1.

    Raises:
        TensorParallelError: a width below 1, one that neither divides nor is a multiple of the K/V heads, more
            devices than there are, or a mesh without the tensor axes or with other sizes of them.
    """
    if isinstance(tensor_parallel, Mesh):
        return _checked(tensor_parallel, num_kv_heads)
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise TensorParallelError(
            f"tensor_parallel is {tensor_parallel!r}; give a whole number of at least 1, or a mesh with the axes "
            f"{' and '.join(TENSOR_AXES)}"
        )
    if tensor_parallel == 1:
        return None
    sizes = axes_for(tensor_parallel, num_kv_heads)
    return TensorMesh(Mesh(_devices(tensor_parallel).reshape(sizes), TENSOR_AXES))


def axes_for(width: int, num_kv_heads: int) -> TensorAxes:
    """Sizes of the tensor axes. Raises TensorParallelError where neither number divides the other."""
    if width % num_kv_heads and num_kv_heads % width:
        raise TensorParallelError(
            f"{num_kv_heads} K/V heads cannot spread over {width} devices: choose a divisor or a multiple of "
            f"{num_kv_heads}"
        )
    shards = min(width, num_kv_heads)
    return TensorAxes(shards, width // shards)


def _checked(mesh: Mesh, num_kv_heads: int) -> TensorMesh:
    missing = [name for name in TENSOR_AXES if name not in mesh.shape]
    if missing:
        raise TensorParallelError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names))} and lacks {' and '.join(missing)}: name them"
        )
    given = TensorAxes(*(mesh.shape[name] for name in TENSOR_AXES))
    wanted = axes_for(given.shards * given.replicas, num_kv_heads)
    if given != wanted:
        raise TensorParallelError(
            f"the mesh has {given.shards} shards of {given.replicas} replicas, but {num_kv_heads} K/V heads on "
            f"{given.shards * given.replicas} devices are {wanted.shards} shards of {wanted.replicas}: reshape it"
        )
    # With axes that are explicit every array operation outside the manual region would have to name its sharding.
    return TensorMesh(Mesh(mesh.devices, mesh.axis_names))


def _devices(width: int) -> np.ndarray:
    """As many devices of every process, process by process: a process without one could not take part."""
    processes = jax.process_count()
    if width % processes:
        raise TensorParallelError(
            f"tensor_parallel {width} does not spread evenly over {processes} processes: choose a multiple of "
            f"{processes}"
        )
    each = width // processes
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(len(devices) for devices in by_process.values())
    if fewest < each:
        hint = (
            f", or set XLA_FLAGS=--xla_force_host_platform_device_count={each} to divide this CPU"
            if jax.default_backend() == "cpu"
            else ""
        )
        raise TensorParallelError(
            f"tensor_parallel {width} needs {each} devices in each of {processes} processes, and one has {fewest}: "
            f"lower it{hint}"
            if processes > 1
            else f"tensor_parallel {width} needs {width} devices, this machine shows {fewest}: lower it{hint}"
        )
    return np.array([device for index in sorted(by_process) for device in by_process[index][:each]])
