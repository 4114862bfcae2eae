"""Random weights of every kind, and the native provider under one instruction set and number of threads."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from paged_case import PagedCase, make_case, plan_shape

from kv_kernels.native import NativeProvider, load_library
from kv_kernels.provider import PoolPair, Scoring
from kv_kernels.weights import BLOCK_SIZE, FORMS, TILE_ROWS, BlockQuantWeight, DenseWeight, Weight, tiled

DENSE_KINDS = ("float32", "bfloat16", "float16")
QUANT_KINDS = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", "f8_e4m3"),
    *("q8_0/groups", "q4_1/groups", "q4_0/tiles", "q4_1/tiles"),
)
"""With `/groups`: float32 scales and mins of groups of more than one block, as checkpoints other than GGUF have. With
`/tiles`: sixteen rows together."""

FEW_QUANT_KINDS = ("q8_0", "q4_1", "q6_k", "q4_1/groups", "q4_1/tiles")
"""For what is around a product: one of each way to unpack."""

AVAILABLE_LEVELS = tuple(load_library().levels())


@contextmanager
def running(*, level: str | None = None, threads: int = 0) -> Iterator[None]:
    """Native calls that are made inside use this instruction set and so many threads."""
    library = load_library()
    before = library.level
    library.set_level(level or before)
    library.set_threads(threads)
    try:
        yield
    finally:
        # A call may still be on its way, with x packed as one level wants it.
        jax.block_until_ready(jax.live_arrays())
        library.set_level(before)
        library.set_threads(0)


def random_weight(seed: int, kind: str, *stack: int, out_features: int, in_features: int) -> Weight:
    """A weight [*stack, out, in]; a quantized one has in_features rounded up to whole blocks, one in tiles out_features
    to whole tiles.
    """
    rng = np.random.default_rng(seed)
    if kind in DENSE_KINDS:
        return DenseWeight(jnp.asarray(rng.standard_normal((*stack, out_features, in_features), np.float32), kind))
    kind, _, way = kind.partition("/")
    grouped = way == "groups"
    if way == "tiles":
        out_features = -(-out_features // TILE_ROWS) * TILE_ROWS
    form, blocks, rows = FORMS[kind], -(-in_features // BLOCK_SIZE), (*stack, out_features)
    groups = blocks
    if form.block_factors or grouped:
        groups //= math.gcd(blocks, 8) if seed % 2 else blocks
    number = jnp.float32 if grouped or kind == "f8_e4m3" else jnp.float16

    def integers(low: int, high: int, per_block: int, dtype: type) -> jnp.ndarray:
        return jnp.asarray(rng.integers(low, high, (*rows, blocks * per_block), dtype))

    scales = jnp.asarray(rng.uniform(0.01, 0.1, (*rows, groups)), number)
    mins = jnp.asarray(rng.standard_normal((*rows, groups)), number) if form.has_mins else None
    if kind == "f8_e4m3":
        quants = jnp.asarray(rng.standard_normal((*rows, blocks * 32)) * 2.0 ** rng.integers(-9, 5), jnp.float8_e4m3fn)
    else:
        quants = integers(-128, 128, 32, np.int8) if form.is_bytes else integers(0, 256, 16, np.uint8)
    factors = form.block_factors
    weight = BlockQuantWeight(
        quants,
        scales,
        mins,
        kind,
        high_bits=integers(0, 256, 4 * form.high_bits, np.uint8) if form.high_bits else None,
        scale_factors=integers(-31 if factors == 2 else 0, 32, factors, np.int8) if factors else None,
        min_factors=integers(0, 32, factors, np.int8) if factors and form.has_mins else None,
    )
    return jax.tree.map(jnp.asarray, tiled(weight)) if way == "tiles" else weight


def attend(
    case: PagedCase, shape=None, *, scale=0.3, window=None, soft_cap=None, dtype="float32", provider=None
) -> np.ndarray:
    """Paged attention of a case, natively unless by another provider: [tokens, heads, head_dim] f32."""
    shape, provider = shape or plan_shape(case), provider or NativeProvider()
    q = np.zeros((shape.tokens, *case.q.shape[1:]), np.float32)
    q[: len(case.q)] = case.q
    out = provider.paged_attention(
        jnp.asarray(q, dtype),
        case.pools,
        jax.tree.map(jnp.asarray, provider.plan(case.table, shape)),
        first_page=case.layer * case.num_pages,
        scoring=Scoring(np.float32(scale), window, soft_cap),
    )
    padding = np.asarray(out[len(case.q) :].astype(jnp.float32))
    assert not padding.any()
    return np.asarray(out.astype(jnp.float32))[: len(case.q)]


def alone(case: PagedCase, row: int, queries: slice) -> PagedCase:
    """One row's K/V up to its query `queries.stop`, with the queries of the slice only."""
    start, end = (int(entry) for entry in case.table.query_start[row : row + 2])
    k, v = case.k_rows[row], case.v_rows[row]
    kv_len, dtype = len(k) - (end - start - queries.stop), case.pools.k.dtype
    sizes = {"heads": case.q.shape[1], "kv_heads": k.shape[1], "head_dim": k.shape[2], "dtype": str(dtype)}
    single = make_case(6, kv_len=[kv_len], query_len=[queries.stop - queries.start], **sizes)
    k_pool, v_pool = (np.array(pool.astype(jnp.float32)) for pool in single.pools)
    for position in range(kv_len):
        where = single.layer * single.num_pages + single.table.page_ids[position // 16], position % 16
        k_pool[where], v_pool[where] = k[position], v[position]
    pools = PoolPair(jnp.asarray(k_pool, dtype), jnp.asarray(v_pool, dtype))
    return single._replace(q=case.q[start + queries.start : start + queries.stop], pools=pools)


@st.composite
def ragged_lengths(draw):
    kv_len = draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    query_len = [draw(st.one_of(st.just(1), st.integers(1, total))) for total in kv_len]
    return kv_len, query_len
