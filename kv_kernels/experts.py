"""A mixture of experts (Shazeer et al., 2017): every token chooses a few gated MLPs, and only those are computed.

The pairs of token and chosen expert are sorted by expert and dealt to tiles of one expert each, as many as there turn
out to be. A provider runs the tiles; it picks an expert's matrices from the stack of all layers' experts, so no expert
is ever sliced out and quantized ones stay so. A pair's result has a row of its own and a token's are summed in the
order of its choices, whatever its batch. `lax.ragged_dot` would not do: where it is decomposed, as on a CPU, it
multiplies all rows by all experts, and it takes neither a stack of layers nor quantized weights.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kv_kernels.provider import Activation, KernelProvider, Tiles
from kv_kernels.weights import LayerIndex, Weight, flatten_stack

MAX_TILE = 32
"""Tokens of one expert that are multiplied at once: enough to read a matrix once for many, few enough to pad little."""


NO_EXPERT = -1
"""The choice of a token that nothing is to be computed for."""


class Routing(NamedTuple):
    """chosen [tokens, k] i32: each token's experts, the best first, or NO_EXPERT; weights [tokens, k] f32."""

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


def tile_pairs(chosen: jax.Array, num_experts: int, first_expert: jax.Array | int = 0) -> Tiles:
    """The pairs of chosen [tokens, k] in tiles, whose entries are the `num_experts` experts from `first_expert` on."""
    pairs = chosen.size
    width = tile_width(pairs, num_experts)
    # Most tiles where as many experts as can be have a pair, a tile each, and the rest of the pairs fill tiles.
    fewest = min(pairs, num_experts)
    tile = jnp.arange(fewest + (pairs - fewest) // width)
    of_pair = chosen.reshape(-1) - first_expert
    of_pair = jnp.where((of_pair >= 0) & (of_pair < num_experts), of_pair, num_experts)  # others' come last
    by_expert = jnp.argsort(of_pair, stable=True).astype(jnp.int32)
    count = jnp.zeros(num_experts, jnp.int32).at[of_pair].add(1, mode="drop")
    tiles = -(-count // width)
    first_pair, end_tile = jnp.cumsum(count) - count, jnp.cumsum(tiles)
    # Of padding it is the last one: XLA takes a lone tile's products out of their loop and computes them always.
    expert = jnp.minimum(jnp.sum(end_tile <= tile[:, None], axis=1, dtype=jnp.int32), num_experts - 1)
    offset = ((tile - end_tile[expert] + tiles[expert]) * width)[:, None] + jnp.arange(width)
    real = offset < count[expert][:, None]
    pair = by_expert[jnp.where(real, first_pair[expert][:, None] + offset, 0)]
    return Tiles(expert, jnp.where(real, pair, pairs), end_tile[-1])


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
    tiles = tile_pairs(routing.chosen, num_experts, first_expert)
    tiles = tiles._replace(entry=layer * num_experts + tiles.entry)
    gate, up, down = (flatten_stack(weight) for weight in (experts.gate, experts.up, experts.down))
    results = provider.grouped_mlp(x, gate, up, down, tiles, k, activation=experts.activation)
    weighted = results.reshape(tokens, k, -1) * routing.weights[..., None]
    # Addition by addition: how XLA orders those of a reduction depends on the number of tokens.
    return functools.reduce(jnp.add, (weighted[:, choice] for choice in range(k)))
