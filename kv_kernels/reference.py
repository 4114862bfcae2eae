"""The reference provider: plain jax.numpy on any platform, and what every other provider is tested against.

Attention walks tiles of query tokens, and per tile blocks of `KV_BLOCK` keys with an online softmax (Milakov and
Gimelshein, 2018). Both loops have run-time trip counts, so padding costs nothing and no shape depends on how long a
context is. Keys are taken in blocks of a fixed size counted from position 0, so the order of a row's reduction
depends on neither its batch nor its chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kv_common.page_table import KvPageTableV1
from kv_kernels.composition import ComposedKernels, multiply
from kv_kernels.provider import KernelNeeds, PlanShape, PoolPair, Scoring
from kv_kernels.scatter import write_rows
from kv_kernels.weights import LayerIndex, Weight

SoftmaxCarry = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum and sum [kv_heads, queries], and weighted values [kv_heads, queries, head_dim]."""

KV_BLOCK = 128
QUERY_TILE = 16


class ReferencePlan(NamedTuple):
    """Where each tile of queries begins and what its row may see; int32, padded to the step's shape."""

    num_tiles: np.ndarray  # []
    tile_start: np.ndarray  # [tiles] first query token
    tile_position: np.ndarray  # [tiles] position of that token in its sequence
    tile_row: np.ndarray  # [tiles]
    kv_len: np.ndarray  # [rows]
    page_start: np.ndarray  # [rows] first entry of the row in page_ids
    page_ids: np.ndarray  # [page_entries] pages of layer 0


def tile_width(shape: PlanShape) -> int:
    """Query tokens per tile: one where every row has one token, since a wider tile would be mostly padding."""
    return 1 if shape.tokens == shape.rows else QUERY_TILE


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out


@dataclass(frozen=True)
class ReferenceProvider(ComposedKernels):
    """Plain jax.numpy; float32, bfloat16 and float16 pools, any head_dim, group size, page size, window and soft
    cap.
    """

    @property
    def name(self) -> str:
        return "reference"

    def unsupported(self, needs: KernelNeeds) -> str | None:
        if needs.kv_dtype not in ("float32", "bfloat16", "float16"):
            return f"K/V dtype {needs.kv_dtype} is not one of float32, bfloat16, float16"
        if needs.num_heads % needs.num_kv_heads:
            return f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} K/V heads"
        return None

    def plan(self, table: KvPageTableV1, shape: PlanShape) -> ReferencePlan:
        width = tile_width(shape)
        query_len = np.diff(table.query_start)
        tiles_per_row = -(-query_len // width)
        tile_row = np.repeat(np.arange(len(query_len), dtype=np.int32), tiles_per_row)
        first_tile = np.cumsum(tiles_per_row) - tiles_per_row
        offset = (np.arange(len(tile_row), dtype=np.int32) - first_tile[tile_row]) * width
        start = table.query_start[tile_row] + offset
        max_tiles = shape.tokens // width + (0 if width == 1 else shape.rows)
        return ReferencePlan(
            num_tiles=np.asarray(len(tile_row), np.int32),
            tile_start=_padded(start, max_tiles),
            tile_position=_padded((table.kv_len - query_len)[tile_row] + offset, max_tiles),
            tile_row=_padded(tile_row, max_tiles),
            kv_len=_padded(table.kv_len, shape.rows),
            page_start=_padded(table.page_indptr[:-1], shape.rows),
            page_ids=_padded(table.page_ids, shape.page_entries),
        )

    def later(self, plan: ReferencePlan, steps: jax.Array | int) -> ReferencePlan:
        return plan._replace(tile_position=plan.tile_position + steps, kv_len=plan.kv_len + steps)

    def append_kv(self, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair) -> PoolPair:
        # By page and offset: a pool of one head that is reshaped to slots and back is copied, since XLA then takes the
        # axis of that head for the outermost.
        where = (slots // pools.k.shape[1], slots % pools.k.shape[1])
        return PoolPair(write_rows(pools.k, where, k_new), write_rows(pools.v, where, v_new))

    def paged_attention(
        self,
        q: jax.Array,
        pools: PoolPair,
        plan: ReferencePlan,
        *,
        first_page: jax.Array | int,
        scoring: Scoring,
    ) -> jax.Array:
        scale, window, soft_cap = scoring
        tokens, heads, head_dim = q.shape
        tokens_per_page, kv_heads = pools.k.shape[1:3]
        group = heads // kv_heads
        width = tile_width(PlanShape(tokens, plan.kv_len.shape[0], 0))
        # A page much longer than a block is read in parts, or a short sequence would cost as much as a full page.
        parts = tokens_per_page // KV_BLOCK if tokens_per_page % KV_BLOCK == 0 else 1
        part = tokens_per_page // parts
        parts_per_block = max(1, KV_BLOCK // part)
        block = parts_per_block * part
        k_parts, v_parts = (pool.reshape(-1, part, kv_heads, head_dim) for pool in pools)
        q = jnp.pad(q, ((0, width), (0, 0), (0, 0)))

        def attend_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
            row, start, position = plan.tile_row[tile], plan.tile_start[tile], plan.tile_position[tile]
            kv_len, page_start = plan.kv_len[row], plan.page_start[row]
            query = lax.dynamic_slice_in_dim(q, start, width).reshape(width, kv_heads, group, head_dim)
            query = query.transpose(1, 0, 2, 3).reshape(kv_heads, width * group, head_dim)
            query = query.astype(jnp.float32) * scale
            query_position = jnp.repeat(position + jnp.arange(width), group)

            def attend_block(index: jax.Array, carry: SoftmaxCarry) -> SoftmaxCarry:
                best, total, values = carry
                entry = index * parts_per_block + jnp.arange(parts_per_block)
                mapped = entry * part < kv_len
                page = jnp.where(mapped, plan.page_ids[page_start + entry // parts], 0) + first_page
                rows = page * parts + entry % parts
                key = k_parts[rows].reshape(block, kv_heads, head_dim).astype(jnp.float32)
                value = v_parts[rows].reshape(block, kv_heads, head_dim).astype(jnp.float32)
                key_position = index * block + jnp.arange(block)
                visible = (key_position <= query_position[:, None]) & (key_position < kv_len)
                if window is not None:
                    visible &= key_position > query_position[:, None] - window
                score = jnp.einsum("hqd,khd->hqk", query, key, preferred_element_type=jnp.float32)
                if soft_cap is not None:
                    score = soft_cap * jnp.tanh(score / soft_cap)
                score = jnp.where(visible, score, -jnp.inf)
                new_best = jnp.maximum(best, score.max(-1))
                finite_best = jnp.where(jnp.isfinite(new_best), new_best, 0)
                weight = jnp.exp(score - finite_best[..., None])
                shrink = jnp.exp(best - finite_best)
                # A weight of 0 does not silence a NaN that the stale tail of a page may hold, or a page given back.
                held = key_position < kv_len
                if window is not None:
                    held &= key_position > position - window
                value = jnp.where(held[:, None, None], value, 0)
                added = jnp.einsum("hqk,khd->hqd", weight, value, preferred_element_type=jnp.float32)
                return new_best, total * shrink + weight.sum(-1), values * shrink[..., None] + added

            first_visible = 0 if window is None else jnp.maximum(position - window + 1, 0) // block
            end = (jnp.minimum(position + width, kv_len) + block - 1) // block
            empty = (
                jnp.full((kv_heads, width * group), -jnp.inf),
                jnp.zeros((kv_heads, width * group)),
                jnp.zeros((kv_heads, width * group, head_dim)),
            )
            _, total, values = lax.fori_loop(first_visible, end, attend_block, empty)
            values = values / jnp.where(total == 0, 1, total)[..., None]
            values = values.reshape(kv_heads, width, group, head_dim).transpose(1, 0, 2, 3)
            # A tile may spill past its row's last token; the next tile, or the cut at the end, takes that back.
            return lax.dynamic_update_slice_in_dim(
                out, values.reshape(width, heads, head_dim).astype(out.dtype), start, 0
            )

        return lax.fori_loop(0, plan.num_tiles, attend_tile, jnp.zeros_like(q))[:tokens]

    def product(
        self, x: jax.Array, weight: Weight, layer: LayerIndex | None, out_dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        return multiply(x, weight, layer, out_dtype, for_cpu=True)
