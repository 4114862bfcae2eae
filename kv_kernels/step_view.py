"""The attention seam: all that a model sees of the cache while a step runs.

A model hands over queries, keys and values of a layer and gets the attended values back; pages, slots and plans stay
in here. The view is a value: `attend` returns a new one that holds the pools after the append, and the layer loop
carries it, so the pools have one owner at every point of the traced program and XLA updates them in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kv_kernels.adapters import adapter_products
from kv_kernels.composition import activate, normalize, of_layer
from kv_kernels.experts import NO_EXPERT, Experts, Routing, expert_mlp
from kv_kernels.provider import (
    Activation,
    Affine,
    KernelProvider,
    LowRank,
    Norm,
    Placement,
    PoolPair,
    Rotation,
    Scoring,
)
from kv_kernels.tensor_parallel import EXPERT, KV_HEAD_SHARD, TENSOR_AXES, Split
from kv_kernels.weights import LayerIndex, StoredWeight


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
    """One step over the paged cache: `positions` [tokens] i32 is the only array of it that a model reads.

    Tokens behind the first `used` [] i32 are padding, whose results nobody reads; None where all are used.
    `adapter_mask` [tokens, columns] bool says which adapters' columns each token has; None where there are no adapters.
    """

    positions: jax.Array
    pools: PoolPair
    placement: Placement
    plan: Any
    provider: KernelProvider = field(metadata={"static": True})
    num_pages: int = field(metadata={"static": True})
    unroll: bool = field(default=False, metadata={"static": True})
    tensor_width: int = field(default=1, metadata={"static": True})  # above 1 inside a `TensorMesh.manual` region
    expert_shards: int = field(default=1, metadata={"static": True})
    used: jax.Array | None = None
    adapter_mask: jax.Array | None = None

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: LayerIndex,
        scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> Attended:
        """Rotate q and k, append k, v [tokens, kv_heads, head_dim] of `layer`, then attend q [tokens, heads, head_dim]
        over everything so far.
        """
        values, pools = self.provider.attend(
            *(q, k, v, self.pools, self.placement, self.plan),
            layer=layer,
            num_pages=self.num_pages,
            scoring=scoring,
            rotation=rotation,
        )
        return Attended(values, replace(self, pools=pools))

    def linear(
        self,
        x: jax.Array,
        matrix: Affine,
        layer: LayerIndex | None = None,
        *,
        norm: Norm | None = None,
        out_dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """norm(x) [tokens, in] times matrix [out, in] transposed, bias added -> [tokens, out]; `layer` picks from a
        stack [layers, out, in].
        """
        (result,) = self.linears(x, (matrix,), layer, norm=norm, out_dtype=out_dtype)
        return result

    def linears(
        self,
        x: jax.Array,
        matrices: Sequence[Affine],
        layer: LayerIndex | None,
        *,
        norm: Norm | None = None,
        out_dtype: jax.typing.DTypeLike | None = None,
    ) -> tuple[jax.Array, ...]:
        """`linear` with several matrices that share x."""
        adapters = [matrix.adapters for matrix in matrices if matrix.adapters is not None]
        if not adapters:
            return self.provider.linear(x, matrices, layer, norm=norm, out_dtype=out_dtype, used=self.used)
        # A layer's matrices all have adapters, or none has.
        plain = [matrix._replace(adapters=None) for matrix in matrices]
        products = self.provider.linear(x, plain, layer, norm=norm, out_dtype=jnp.float32, used=self.used)
        added = self._adapted(x, adapters, layer, norm)
        dtype = out_dtype or x.dtype
        return tuple((product + more).astype(dtype) for product, more in zip(products, added, strict=True))

    def gated(
        self,
        x: jax.Array,
        gate: Affine,
        up: Affine,
        layer: LayerIndex,
        activation: Activation,
        *,
        norm: Norm | None = None,
    ) -> jax.Array:
        """activation(linear(x, gate)) * linear(x, up)."""
        if gate.adapters or up.adapters:
            # What adapters add comes before the activation, so the pass cannot be one.
            gate_part, up_part = self.linears(x, (gate, up), layer, norm=norm)
            return activate(gate_part, activation) * up_part
        (result,) = self.provider.linear(x, (gate, up), layer, norm=norm, activation=activation, used=self.used)
        return result

    def normalize(
        self, x: jax.Array, norm: Norm, layer: LayerIndex | None = None, *, split: Split = "whole"
    ) -> jax.Array:
        """RMSNorm over the last axis of x [..., features]; `split` says how tensor parallelism has spread it."""
        if split == "whole" or self.tensor_width == 1:
            return self.provider.normalize(x, norm, layer)
        axes: dict[str, tuple[str, ...]] = {"outputs": TENSOR_AXES, "kv_outputs": (KV_HEAD_SHARD,)}
        return normalize(x, norm, layer, axes[split])

    def add_linear(
        self,
        residual: jax.Array,
        x: jax.Array,
        matrix: Affine,
        layer: LayerIndex,
        *,
        norm: Norm | None = None,
        scale: float = 1.0,
    ) -> jax.Array:
        """residual [tokens, out] + scale * norm(linear(x, matrix)): what closes an attention or MLP block.

        Under tensor parallelism x and the matrix are spread over the ranks by input features. The ranks' products are
        summed in float32, and bias and residual added once, to the sum.
        """
        if self.tensor_width == 1:
            if norm is None and scale == 1 and not matrix.adapters:
                (result,) = self.provider.linear(x, (matrix,), layer, residual=residual, used=self.used)
                return result
            return self._add(residual, self.linear(x, matrix, layer), layer, norm, scale)
        part = self.provider.product(x, matrix.weight, layer, jnp.float32)
        if matrix.adapters is not None:
            part = part + self._adapted(x, [matrix.adapters], layer)[0]
        total = lax.psum(part, TENSOR_AXES)
        if matrix.bias is not None:
            total = total + of_layer(matrix.bias, layer)
        return self._add(residual, total.astype(x.dtype), layer, norm, scale)

    def add_experts(
        self,
        residual: jax.Array,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        layer: LayerIndex,
        *,
        norm: Norm | None = None,
        scale: float = 1.0,
    ) -> jax.Array:
        """residual [tokens, hidden] + scale * norm(the chosen experts' MLPs of x [tokens, hidden], weighted).

        Under tensor parallelism every rank has its part of each expert's inner features, and over an axis for experts
        some of the experts.
        """
        shards, axes = self.expert_shards, TENSOR_AXES if self.tensor_width > 1 else ()
        first = lax.axis_index(EXPERT) * experts.gate.stack[1] if shards > 1 else 0
        if self.used is not None:
            is_padding = jnp.arange(x.shape[0]) >= self.used
            routing = routing._replace(chosen=jnp.where(is_padding[:, None], NO_EXPERT, routing.chosen))
        total = expert_mlp(self.provider, x, routing, experts, layer, first_expert=first)
        if shards > 1 or axes:
            total = lax.psum(total, (*axes, EXPERT) if shards > 1 else axes)
        return self._add(residual, total.astype(x.dtype), layer, norm, scale)

    def _add(self, residual: jax.Array, x: jax.Array, layer: LayerIndex, norm: Norm | None, scale: float) -> jax.Array:
        if norm is not None:
            x = self.provider.normalize(x, norm, layer)
        return residual + (x if scale == 1 else x * jnp.asarray(scale, x.dtype))

    def _adapted(
        self, x: jax.Array, adapters: Sequence[LowRank], layer: LayerIndex | None, norm: Norm | None = None
    ) -> list[jax.Array]:
        """What each of `adapters` adds for norm(x) [tokens, in] -> [tokens, out] f32."""
        assert self.adapter_mask is not None
        return adapter_products(self.provider, x, adapters, layer, self.adapter_mask, norm)

    def embed(self, token_ids: jax.Array, weight: StoredWeight) -> jax.Array:
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
