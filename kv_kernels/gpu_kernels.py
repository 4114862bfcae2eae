"""What every provider of a GPU shares beside the cache: products by XLA, and a mixture's experts by a Triton kernel."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from kv_kernels.composition import ComposedKernels
from kv_kernels.provider import Activation, KernelProvider, Tiles
from kv_kernels.weights import Weight


class _GpuProvider(KernelProvider, Protocol):
    @property
    def interpret(self) -> bool: ...


class GpuKernels(ComposedKernels):
    """`interpret` runs our own kernels on a CPU."""

    interpret: bool = False

    def later(self, plan: Any, steps: jax.Array | int) -> Any | None:
        """See KernelProvider; the host deals these kernels their work step by step."""
        return None

    def grouped_mlp(
        self: _GpuProvider,
        x: jax.Array,
        gate: Weight,
        up: Weight,
        down: Weight,
        tiles: Tiles,
        k: int,
        *,
        activation: Activation,
    ) -> jax.Array:
        """See KernelProvider; weights that the kernel does not read go through `linear`, a tile at a time."""
        from kv_kernels.pallas.grouped import can_group, grouped_mlp  # with Triton's dialect, which a CPU need not load

        if not (can_group(gate) and can_group(up) and can_group(down)):
            return ComposedKernels.grouped_mlp(self, x, gate, up, down, tiles, k, activation=activation)
        return grouped_mlp(x, gate, up, down, tiles, k, activation=activation, interpret=self.interpret)
