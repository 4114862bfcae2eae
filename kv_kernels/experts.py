"""A mixture of experts (Shazeer et al., 2017): every token chooses a few gated MLPs, and only those are computed.

The pairs of token and chosen expert are sorted by expert and walked in tiles, each of one expert, with a run-time trip
count: a tile gathers its tokens' rows and multiplies by that expert's matrices through the provider, which picks them
from the stack of all layers' experts, so no expert is ever sliced out and quantized ones stay so. A pair's result goes
to a slot of its own and a token's are summed in the order of its choices, whatever its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kv_kernels.provider import Activation, Affine, KernelProvider
from kv_kernels.weights import LayerIndex, Weight, flatten_stack

MAX_TILE = 32
"""Tokens of one expert that are multiplied at once: enough to read a matrix once for many, few enough to pad little."""


class Routing(NamedTuple):
    """chosen [tokens, k] i32: each token's experts, the best first; weights [tokens, k] f32."""

    chosen: jax.Array
    weights: jax.Array


class Experts(NamedTuple):
    """Gated MLPs: gate, up [layers, experts, inner, hidden], down [layers, experts, hidden, inner]."""

    gate: Weight
    up: Weight
    down: Weight
    activation: Activation


def route(logits: jax.Array, k: int, *, renormalize: bool) -> Routing:
    """The k experts with the largest of logits [tokens, experts] f32, weighted by their softmax.

    The softmax is over all experts, or over the chosen ones where `renormalize` is set.
    """
    weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), k)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(chosen.astype(jnp.int32), weights)


def tile_width(pairs: int, num_experts: int) -> int:
    """Rows of a tile: as many as an expert has on average, rounded up to a power of two."""
    average = -(-pairs // num_experts)
    return min(MAX_TILE, 1 << (average - 1).bit_length())


def expert_mlp(
    provider: KernelProvider,
    x: jax.Array,
    routing: Routing,
    experts: Experts,
    layer: LayerIndex,
    *,
    first_expert: jax.Array | int = 0,
) -> jax.Array:
    """Sum over a token's choices of weight * expert(x): x [tokens, hidden] -> the same shape, float32.

    `experts` may be some of those routed to, from `first_expert` on: then choices of others add nothing.
    """
    tokens, k = routing.chosen.shape
    num_experts = experts.gate.stack[1]
    pairs = tokens * k
    width = tile_width(pairs, num_experts)
    gate, up, down = (Affine(flatten_stack(weight)) for weight in (experts.gate, experts.up, experts.down))
    of_pair = routing.chosen.reshape(-1) - first_expert
    of_pair = jnp.where((of_pair >= 0) & (of_pair < num_experts), of_pair, num_experts)  # others' come last
    by_expert = jnp.argsort(of_pair, stable=True)
    count = jnp.zeros(num_experts, jnp.int32).at[of_pair].add(1, mode="drop")
    first_pair = jnp.cumsum(count) - count
    tiles = -(-count // width)
    end_tile = jnp.cumsum(tiles)

    def compute_tile(tile: jax.Array, results: jax.Array) -> jax.Array:
        expert = jnp.sum(end_tile <= tile)
        offset = (tile - end_tile[expert] + tiles[expert]) * width + jnp.arange(width)
        real = offset < count[expert]
        pair = by_expert[jnp.where(real, first_pair[expert] + offset, 0)]
        index = layer * num_experts + expert
        (wide,) = provider.linear(x[pair // k], (gate, up), index, activation=experts.activation)
        (out,) = provider.linear(wide, (down,), index, out_dtype=jnp.float32)
        return results.at[jnp.where(real, pair, pairs)].set(out, mode="drop")

    results = lax.fori_loop(0, end_tile[-1], compute_tile, jnp.zeros((pairs, x.shape[1]), jnp.float32))
    return jnp.sum(results.reshape(tokens, k, -1) * routing.weights[..., None], axis=1)
