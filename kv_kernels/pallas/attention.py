"""Ragged paged attention: tiles of queries for rows of many tokens, splits of keys for rows of one.

Rows of one token read much and compute little, so their keys are split among programs and the partial results merged
by a second kernel; the rest read each key once for a tile of queries. Both may be in one step: the second writes into
the result of the first.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kv_kernels.pallas.plan import TILE_TOKENS, PallasPlan
from kv_kernels.pallas.softmax import (
    MIN_PRODUCT,
    NOTHING_YET,
    HeadShape,
    KeySource,
    Softmax,
    attend_keys,
    divide,
    first_visible,
    head_shape,
)
from kv_kernels.provider import PoolPair, Scoring

TILE_QUERIES = {4: 64, 2: 128}
"""Most queries of a program by the bytes of an element, so that they and their values stay in registers."""
TILE_BYTES = 32768
MERGED_SPLITS = 32

# mypy: disable-error-code="no-untyped-def"
# Refs, the arguments of kernels, have no public type.


def paged_attention(
    q: jax.Array,
    pools: PoolPair,
    plan: PallasPlan,
    *,
    first_page: jax.Array | int,
    scoring: Scoring,
    interpret: bool,
) -> jax.Array:
    """q [tokens, heads, head_dim] over the pages of the plan -> the same shape; tokens of padding become 0."""
    shape = head_shape(q, pools)
    origin = jnp.asarray(first_page, jnp.int32).reshape(1)
    operands = (q, *pools, plan.page_ids, origin)
    out = None
    if plan.tiles.shape[1]:
        out = _attend_tiles(operands, plan, shape, scoring, interpret)
    partials = _attend_splits(operands, plan, shape, scoring, interpret)
    return _merge_splits(partials, plan, q, out, interpret)


def _attend_tiles(operands, plan: PallasPlan, shape: HeadShape, scoring: Scoring, interpret: bool) -> jax.Array:
    q = operands[0]
    queries = min(TILE_QUERIES[np.dtype(shape.dtype).itemsize], TILE_BYTES // shape.row_bytes)
    width = min(TILE_TOKENS, max(1, queries // shape.group_lanes))
    queries = max(MIN_PRODUCT, width * shape.group_lanes)
    parts = TILE_TOKENS // width

    def jaxkv_attend_tiles(q_ref, k_ref, v_ref, page_ids_ref, origin_ref, tiles_ref, out_ref):
        tile, part = divide(pl.program_id(0), parts), lax.rem(pl.program_id(0), jnp.int32(parts))
        kv_head = pl.program_id(1)
        start, length, position, first_entry = (tiles_ref[field, tile] for field in range(4))
        first = part * width
        lane = lax.iota(jnp.int32, queries)
        token, member = first + divide(lane, shape.group_lanes), lane & (shape.group_lanes - 1)
        dim = lax.broadcasted_iota(jnp.int32, (1, shape.dim_lanes), 1)
        where = ((start + token)[:, None], (kv_head * shape.group + member)[:, None], dim)
        mask = ((token < length) & (member < shape.group))[:, None] & (dim < shape.head_dim)
        end = jnp.minimum(first + width, length)
        softmax = attend_keys(
            plgpu.load(q_ref.at[where], mask=mask, other=0).astype(shape.dtype),
            position + token,
            KeySource((k_ref, v_ref), page_ids_ref, first_entry, origin_ref[0], kv_head),
            shape,
            scoring,
            first_key=first_visible(position + first, scoring),
            # A part behind the end of its row has no keys to see.
            end_key=jnp.where(first < length, jnp.maximum(position + end, 0), 0),
        )
        plgpu.store(out_ref.at[where], _normalized(softmax).astype(out_ref.dtype), mask=mask)

    return pl.pallas_call(
        jaxkv_attend_tiles,
        grid=(plan.tiles.shape[1] * parts, q.shape[1] // shape.group),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
    )(*operands, plan.tiles)


def _attend_splits(operands, plan: PallasPlan, shape: HeadShape, scoring: Scoring, interpret: bool) -> Softmax:
    """A softmax for each split and head: best and total [splits, heads], values [splits, heads, head_dim]."""
    q = operands[0]
    _, heads, head_dim = q.shape
    queries = max(MIN_PRODUCT, shape.group_lanes)
    num_splits = plan.splits.shape[1]

    def jaxkv_attend_splits(
        q_ref,
        k_ref,
        v_ref,
        page_ids_ref,
        origin_ref,
        entries_ref,
        splits_ref,
        keys_ref,
        best_ref,
        total_ref,
        values_ref,
    ):
        split, kv_head = pl.program_id(0), pl.program_id(1)
        entry, first_key = splits_ref[0, split], splits_ref[1, split]
        token, position, first_entry = (entries_ref[field, entry] for field in range(3))
        lane = lax.iota(jnp.int32, queries)
        head = kv_head * shape.group + lane
        dim = lax.broadcasted_iota(jnp.int32, (1, shape.dim_lanes), 1)
        used = (lane < shape.group) & (first_key <= position)
        mask = used[:, None] & (dim < shape.head_dim)
        softmax = attend_keys(
            plgpu.load(q_ref.at[token, head[:, None], dim], mask=mask, other=0).astype(shape.dtype),
            jnp.full_like(lane, position),
            KeySource((k_ref, v_ref), page_ids_ref, first_entry, origin_ref[0], kv_head),
            shape,
            scoring,
            first_key=jnp.maximum(first_key, first_visible(position, scoring)),
            end_key=jnp.where(first_key <= position, jnp.minimum(first_key + keys_ref[0], position + 1), 0),
        )
        plgpu.store(best_ref.at[split, head], softmax.best, mask=used)
        plgpu.store(total_ref.at[split, head], softmax.total, mask=used)
        plgpu.store(values_ref.at[split, head[:, None], dim], softmax.values, mask=mask)

    stored = [(num_splits, heads), (num_splits, heads), (num_splits, heads, head_dim)]
    return Softmax(
        *pl.pallas_call(
            jaxkv_attend_splits,
            grid=(num_splits, heads // shape.group),
            out_shape=[jax.ShapeDtypeStruct(size, jnp.float32) for size in stored],
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
        )(*operands, plan.entries, plan.splits, plan.split_keys)
    )


def _merge_splits(
    partials: Softmax, plan: PallasPlan, q: jax.Array, out: jax.Array | None, interpret: bool
) -> jax.Array:
    """The values of every entry, written into `out` where there is one."""
    _, heads, head_dim = q.shape
    dim_lanes = pl.next_power_of_2(head_dim)

    def jaxkv_merge_splits(best_ref, total_ref, values_ref, entries_ref, starts_ref, *out_refs):
        entry, head = pl.program_id(0), pl.program_id(1)
        token = entries_ref[0, entry]
        start, end = starts_ref[entry], starts_ref[entry + 1]
        dim = lax.broadcasted_iota(jnp.int32, (1, dim_lanes), 1)

        def merge(index, carry):
            split = start + index * MERGED_SPLITS + lax.iota(jnp.int32, MERGED_SPLITS)
            mask = split < end
            best_here = plgpu.load(best_ref.at[split, head], mask=mask, other=NOTHING_YET)
            total_here = plgpu.load(total_ref.at[split, head], mask=mask, other=0)
            where = values_ref.at[split[:, None], head, dim]
            values_here = plgpu.load(where, mask=mask[:, None] & (dim < head_dim), other=0)
            best, total, values = carry
            new_best = jnp.maximum(best, jnp.max(best_here))
            shrink, weight = jnp.exp(best - new_best), jnp.exp(best_here - new_best)
            total = total * shrink + jnp.sum(total_here * weight)
            return new_best, total, values * shrink + jnp.sum(values_here * weight[:, None], axis=0)

        empty = (jnp.float32(NOTHING_YET), jnp.float32(0), jnp.zeros((dim_lanes,), jnp.float32))
        rounds = divide(end - start + MERGED_SPLITS - 1, MERGED_SPLITS)
        _, total, values = lax.fori_loop(0, rounds, merge, empty)
        values = values / jnp.where(total == 0, 1, total)
        lane = lax.iota(jnp.int32, dim_lanes)
        out_ref = out_refs[-1]
        where = out_ref.at[jnp.maximum(token, 0), head, lane]
        plgpu.store(where, values.astype(out_ref.dtype), mask=(lane < head_dim) & (token >= 0))

    operands = [*partials, plan.entries, plan.entry_splits]
    return pl.pallas_call(
        jaxkv_merge_splits,
        grid=(plan.entries.shape[1], heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={} if out is None else {len(operands): 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(*operands, *([] if out is None else [out]))


def _normalized(softmax: Softmax) -> jax.Array:
    return softmax.values / jnp.where(softmax.total == 0, np.float32(1), softmax.total)[:, None]
