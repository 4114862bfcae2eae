"""Random paged attention cases, and the plainest computation of their answer."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kv_common.page_table import KvPageTableV1
from kv_kernels.provider import PlanShape, PoolPair


class PagedCase(NamedTuple):
    """Pools with K/V of every row already in their pages, the step's table, and queries [tokens, heads, head_dim]."""

    table: KvPageTableV1
    pools: PoolPair
    q: np.ndarray
    k_rows: list[np.ndarray]
    v_rows: list[np.ndarray]
    num_pages: int
    layer: int


def build_table(
    kv_len: list[int], query_len: list[int], pages: list[np.ndarray], tokens_per_page: int
) -> KvPageTableV1:
    """A page table made with plain loops."""
    slots, positions = [], []
    for total, new, ids in zip(kv_len, query_len, pages, strict=True):
        for position in range(total - new, total):
            positions.append(position)
            slots.append(ids[position // tokens_per_page] * tokens_per_page + position % tokens_per_page)

    def ints(values: object) -> np.ndarray:
        return np.asarray(values, np.int32).reshape(-1)

    return KvPageTableV1(
        write_slots=ints(slots),
        positions=ints(positions),
        query_start=ints([0, *np.cumsum(query_len)]),
        page_indptr=ints([0, *np.cumsum([len(ids) for ids in pages])]),
        page_ids=ints(np.concatenate(pages)),
        last_page_len=ints([(total - 1) % tokens_per_page + 1 for total in kv_len]),
        kv_len=ints(kv_len),
        tokens_per_page=tokens_per_page,
    )


def make_case(
    seed: int,
    *,
    kv_len: list[int],
    query_len: list[int],
    tokens_per_page: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: str = "float32",
    layers: int = 2,
    fill: float = np.nan,
) -> PagedCase:
    """Rows of `kv_len` tokens, the last `query_len` of each being new; whatever no row holds is `fill`."""
    rng = np.random.default_rng(seed)
    pages_per_row = [-(-total // tokens_per_page) for total in kv_len]
    num_pages = 1 + sum(pages_per_row) + 2
    order = rng.permutation(np.arange(1, num_pages))
    ends = np.cumsum(pages_per_row)
    pages = [order[end - count : end] for end, count in zip(ends, pages_per_row, strict=True)]
    layer = int(rng.integers(layers))
    shape = (layers * num_pages, tokens_per_page, kv_heads, head_dim)
    k_pool, v_pool = np.full(shape, fill, np.float32), np.full(shape, fill, np.float32)
    k_rows, v_rows = [], []
    for total, ids in zip(kv_len, pages, strict=True):
        k, v = (rng.standard_normal((total, kv_heads, head_dim), np.float32) for _ in range(2))
        k, v = (np.asarray(jnp.asarray(array, dtype).astype(jnp.float32)) for array in (k, v))
        for position in range(total):
            where = layer * num_pages + ids[position // tokens_per_page], position % tokens_per_page
            k_pool[where], v_pool[where] = k[position], v[position]
        k_rows.append(k)
        v_rows.append(v)
    q = rng.standard_normal((sum(query_len), heads, head_dim), np.float32)
    return PagedCase(
        table=build_table(kv_len, query_len, pages, tokens_per_page),
        pools=PoolPair(jnp.asarray(k_pool, dtype), jnp.asarray(v_pool, dtype)),
        q=np.asarray(jnp.asarray(q, dtype).astype(jnp.float32)),
        k_rows=k_rows,
        v_rows=v_rows,
        num_pages=num_pages,
        layer=layer,
    )


def dense_answer(
    case: PagedCase, *, scale: float, window: int | None = None, soft_cap: float | None = None
) -> np.ndarray:
    """What every query attends to, one query and one head at a time, in float64."""
    out = np.zeros(case.q.shape, np.float64)
    group = case.q.shape[1] // case.k_rows[0].shape[1]
    starts = case.table.query_start
    for row, (k, v) in enumerate(zip(case.k_rows, case.v_rows, strict=True)):
        for token in range(starts[row], starts[row + 1]):
            position = len(k) - (starts[row + 1] - token)
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(case.q.shape[1]):
                keys, values = k[first : position + 1, head // group], v[first : position + 1, head // group]
                score = keys.astype(np.float64) @ case.q[token, head].astype(np.float64) * scale
                if soft_cap is not None:
                    score = soft_cap * np.tanh(score / soft_cap)
                weight = np.exp(score - score.max())
                out[token, head] = weight @ values / weight.sum()
    return out


def plan_shape(
    case: PagedCase, *, tokens: int | None = None, rows: int | None = None, spare_entries: int = 5
) -> PlanShape:
    """The step's own sizes, or padded ones."""
    return PlanShape(tokens or case.table.tokens, rows or case.table.rows, len(case.table.page_ids) + spare_entries)
