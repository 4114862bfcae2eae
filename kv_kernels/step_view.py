"""The attention seam: all that a model sees of the cache while a step runs.

A model hands over queries, keys and values of a layer and gets the attended values back; pages, slots and plans stay
in here. The view is a value: `attend` returns a new one that holds the pools after the append, and the layer loop
carries it, so the pools have one owner at every point of the traced program and XLA updates them in place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kv_kernels.provider import KernelProvider, PoolPair
from kv_kernels.scatter import write_rows
from kv_kernels.weights import LayerIndex, Weight


class Attended(NamedTuple):
    """What a layer gets back: values [tokens, heads, head_dim] and the view for what follows."""

    values: jax.Array
    step: "StepView"


class Looped(NamedTuple):
    """The hidden states [tokens, hidden] after the last layer, and the view."""

    x: jax.Array
    step: "StepView"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepView:
    """One step over the paged cache: `positions` [tokens] i32 is the only array of it that a model reads."""

    positions: jax.Array
    pools: PoolPair
    slots: jax.Array  # [tokens] i32: where each token's K/V goes, in layer 0
    scrub_pages: jax.Array  # [entries] i32: pages to clear before the append; -1 for none
    copy_sources: jax.Array  # [rows] i32: pages to copy after that, before the append
    copy_targets: jax.Array  # [rows] i32: where to; -1 for none
    plan: Any
    provider: KernelProvider = field(metadata={"static": True})
    num_pages: int = field(metadata={"static": True})
    unroll: bool = field(default=False, metadata={"static": True})

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
        """Append k, v [tokens, kv_heads, head_dim] of `layer`, then attend q [tokens, heads, head_dim] over
        everything so far.
        """
        first_page = layer * self.num_pages
        pools = self._prepared(first_page)
        pools = self.provider.append_kv(k, v, self.slots + first_page * pools.k.shape[1], pools)
        values = self.provider.paged_attention(
            q, pools, self.plan, first_page=first_page, scale=scale, window=window, soft_cap=soft_cap
        )
        return Attended(values, replace(self, pools=pools))

    def linear(
        self,
        x: jax.Array,
        weight: Weight,
        layer: LayerIndex | None = None,
        out_dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """x [tokens, in] times weight [out, in] transposed -> [tokens, out]; `layer` picks from a stack [layers, out,
        in].
        """
        return self.provider.linear(x, weight, layer, out_dtype)

    def embed(self, token_ids: jax.Array, weight: Weight) -> jax.Array:
        """Rows `token_ids` [tokens] of weight [vocab, hidden] -> [tokens, hidden] f32."""
        return self.provider.embed(token_ids, weight)

    def loop(
        self, num_layers: int, body: Callable[[Any, jax.Array, "StepView"], tuple[jax.Array, "StepView"]], x: jax.Array
    ) -> Looped:
        """Run `body(layer, x, step)` for every layer: compiled once, or laid out layer by layer where `unroll` is
        set.
        """
        carry = (x, self)
        if self.unroll:
            for layer in range(num_layers):
                carry = body(layer, *carry)
        else:
            carry = lax.fori_loop(0, num_layers, lambda layer, carry: tuple(body(layer, *carry)), carry)
        return Looped(*carry)

    def _prepared(self, first_page: LayerIndex) -> PoolPair:
        """The pools with this step's newly dealt pages cleared in one layer, and its shared pages copied.

        Cleared, so that no request can meet another's K/V; copied, so that none writes into a page that another reads.
        """
        scrub = jnp.where(self.scrub_pages < 0, -1, self.scrub_pages + first_page)
        targets = jnp.where(self.copy_targets < 0, -1, self.copy_targets + first_page)

        def prepare(pool: jax.Array) -> jax.Array:
            pool = write_rows(pool, scrub, 0)
            return write_rows(pool, targets, pool[self.copy_sources + first_page])

        return PoolPair(*(prepare(pool) for pool in self.pools))
