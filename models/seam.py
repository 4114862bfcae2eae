"""The seam between a network and the engine: what a model may ask of the step it runs in.

A model hands over q, k, v and gets attended values back; it does not know pages, batches or kernels. The engine
implements this over a paged cache, a test over plain arrays. Only structure is declared here, so neither side imports
the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from kv_kernels.weights import LayerIndex, Weight


class Attended(Protocol):
    """values [tokens, heads, head_dim], and the step with this layer's K/V appended."""

    @property
    def values(self) -> jax.Array: ...

    @property
    def step(self) -> Any: ...


class Step(Protocol):
    """One forward pass over a flat batch of tokens."""

    @property
    def positions(self) -> jax.Array:
        """Position of each token in its sequence, [tokens] i32."""

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: LayerIndex,
        *,
        scale: np.float32,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Attended:
        """Append k, v [tokens, kv_heads, head_dim], then attend with q [tokens, heads, head_dim]."""

    def linear(self, x: jax.Array, weight: Weight, layer: LayerIndex | None = None) -> jax.Array:
        """x [tokens, in] times the weight (of `layer`, where stacked) -> [tokens, out] in x.dtype."""

    def embed(self, ids: jax.Array, weight: Weight) -> jax.Array:
        """Rows `ids` [tokens] of the weight -> [tokens, in]."""

    def loop(self, num_layers: int, body: Callable[[LayerIndex, jax.Array, Any], Any], x: jax.Array) -> Any:
        """Run body(layer, x, step) -> (x, step) for each layer -> (x, step)."""


class Forward(NamedTuple):
    """logits [rows, vocab] f32, and the step with all K/V appended."""

    logits: jax.Array
    step: Any
