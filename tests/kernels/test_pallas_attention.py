"""Ragged paged attention of the Triton kernels, interpreted, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import PagedCase, dense_answer, make_case, plan_shape

from kv_kernels.pallas import PallasProvider, plan
from kv_kernels.provider import PoolPair, Scoring
from kv_kernels.reference import ReferenceProvider

PALLAS = PallasProvider(interpret=True)


@functools.cache
def compiled(provider):
    """Interpreted kernels are long programs and short runs: one for a shape, and without XLA's optimizations."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(provider.paged_attention, static_argnames="scoring", compiler_options=options)


def attend(
    case: PagedCase, shape=None, *, scale=0.3, window=None, soft_cap=None, dtype="float32", provider=PALLAS
) -> np.ndarray:
    shape = shape or plan_shape(case)
    q = np.ones((shape.tokens, *case.q.shape[1:]), np.float32)
    q[: len(case.q)] = case.q
    out = compiled(provider)(
        jnp.asarray(q, dtype),
        case.pools,
        provider.plan(case.table, shape),
        first_page=np.int32(case.layer * case.num_pages),
        scoring=Scoring(np.float32(scale), window, soft_cap),
    )
    return np.asarray(out.astype(jnp.float32))


@st.composite
def ragged_lengths(draw):
    """Whole prompts, chunks behind a context, and single tokens, of more than a tile and more than a split."""
    kv_len = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 600)), min_size=1, max_size=4))
    query_len = [draw(st.one_of(st.just(1), st.integers(1, min(total, 150)))) for total in kv_len]
    if draw(st.booleans()):
        query_len = [1] * len(kv_len)
    return kv_len, query_len


def check_a_mixture(lengths, seed, tokens_per_page, kv_heads, group, head_dim, window, soft_cap, padding):
    kv_len, query_len = lengths
    case = make_case(
        seed,
        kv_len=kv_len,
        query_len=query_len,
        tokens_per_page=tokens_per_page,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    tokens = case.table.tokens + padding
    rows = tokens if max(query_len) == 1 else case.table.rows + padding
    shape = plan_shape(case, tokens=tokens, rows=rows)
    got = attend(case, shape, window=window, soft_cap=soft_cap)
    real = len(case.q)
    wanted = attend(case, shape, window=window, soft_cap=soft_cap, provider=ReferenceProvider())
    np.testing.assert_allclose(got[:real], wanted[:real], atol=2e-5)
    assert not got[real:].any()


MIXTURES = {
    "lengths": ragged_lengths(),
    "seed": st.integers(0, 99),
    "tokens_per_page": st.sampled_from([1, 3, 16, 64, 128]),
    "kv_heads": st.sampled_from([1, 2, 3]),
    "group": st.integers(1, 16),
    "head_dim": st.sampled_from([4, 24, 64, 80]),
    "window": st.sampled_from([None, 1, 7, 130]),
    "soft_cap": st.sampled_from([None, 1.5]),
    "padding": st.integers(0, 9),
}


@settings(max_examples=4)
@given(**MIXTURES)
def test_every_ragged_mixture_equals_the_reference(**mixture):
    check_a_mixture(**mixture)


@pytest.mark.slow
@settings(max_examples=150)
@given(**MIXTURES)
def test_many_ragged_mixtures_equal_the_reference(**mixture):
    check_a_mixture(**mixture)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_half_precision_pools_differ_only_by_rounding(dtype, bound):
    case = make_case(1, kv_len=[140, 5, 300], query_len=[3, 5, 1], head_dim=24, dtype=dtype)
    np.testing.assert_allclose(attend(case, dtype=dtype), dense_answer(case, scale=0.3), atol=bound)


def test_queries_of_another_width_than_the_pools_are_met_in_float32():
    case = make_case(1, kv_len=[140, 5], query_len=[3, 1], head_dim=24, dtype="bfloat16")
    np.testing.assert_allclose(attend(case, dtype="float32"), dense_answer(case, scale=0.3), atol=1e-5)


def test_what_no_row_holds_cannot_reach_the_output_even_as_nan():
    lengths = {"kv_len": [1, 15, 16, 17, 133], "query_len": [1, 2, 16, 1, 4]}
    quiet, loud = make_case(3, **lengths, fill=0.0), make_case(3, **lengths, fill=np.nan)
    assert np.isnan(np.asarray(loud.pools.v)).any()
    np.testing.assert_array_equal(attend(quiet), attend(loud))


@pytest.mark.parametrize("row", [3, 4], ids=["split", "tile"])
def test_a_nan_that_a_row_does_hold_is_not_hidden(row):
    case = make_case(3, kv_len=[1, 15, 16, 17, 133], query_len=[1, 2, 16, 1, 4])
    first, last = case.table.query_start[row : row + 2]
    page = case.layer * case.num_pages + int(case.table.page_ids[case.table.page_indptr[row]])
    got = attend(case._replace(pools=PoolPair(case.pools.k.at[page, 2, 0, 0].set(np.nan), case.pools.v)))
    assert np.isnan(got[first:last, :2]).all()
    assert np.isfinite(np.delete(got, np.s_[first:last], axis=0)).all()


@pytest.mark.parametrize(("window", "soft_cap"), [(7, None), (300, 1.5)])
def test_windows_and_soft_caps_hold_in_tiles_and_in_splits(window, soft_cap):
    case = make_case(2, kv_len=[700, 9, 400], query_len=[1, 1, 20])
    got = attend(case, window=window, soft_cap=soft_cap)
    np.testing.assert_allclose(got, dense_answer(case, scale=0.3, window=window, soft_cap=soft_cap), atol=2e-5)


def test_products_of_float32_are_not_cut_to_tf32():
    case = make_case(2, kv_len=[30, 9], query_len=[20, 1])
    jaxpr = str(
        jax.make_jaxpr(functools.partial(PALLAS.paged_attention, first_page=0, scoring=Scoring(np.float32(1))))(
            case.q, case.pools, PALLAS.plan(case.table, plan_shape(case))
        )
    )
    assert jaxpr.count("dot_general[") == jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 4


def test_the_scale_reaches_the_scores_once():
    case = make_case(4, kv_len=[300, 20, 9], query_len=[1, 17, 1])
    scaled = attend(case, scale=0.25)
    np.testing.assert_array_equal(attend(case._replace(q=case.q * np.float32(0.25)), scale=1), scaled)
    assert np.abs(attend(case, scale=1) - scaled).max() > 0.1


def test_a_token_has_the_same_bits_alone_and_in_a_batch():
    together = make_case(5, kv_len=[700, 200, 33], query_len=[1, 100, 4])
    got = attend(together, plan_shape(together, tokens=128, rows=8))
    for row, chunk in ((0, slice(0, 1)), (1, slice(37, 100))):
        k, v = together.k_rows[row], together.v_rows[row]
        first = int(together.table.query_start[row])
        alone = make_case(6, kv_len=[len(k)], query_len=[chunk.stop - chunk.start])
        pages = alone.table.page_ids
        k_pool, v_pool = (np.array(pool) for pool in alone.pools)
        for position in range(len(k)):
            where = alone.layer * alone.num_pages + pages[position // 16], position % 16
            k_pool[where], v_pool[where] = k[position], v[position]
        q = together.q[first + chunk.start : first + chunk.stop]
        alone = alone._replace(q=q, pools=PoolPair(jnp.asarray(k_pool), jnp.asarray(v_pool)))
        np.testing.assert_array_equal(attend(alone), got[first + chunk.start : first + chunk.stop])


def test_a_step_with_too_many_splits_takes_longer_ones(monkeypatch):
    case = make_case(7, kv_len=[700, 40, 300], query_len=[1, 1, 1])
    usual = PALLAS.plan(case.table, plan_shape(case))
    wanted = attend(case)
    assert usual.split_keys[0] == plan.SPLIT_KEYS
    monkeypatch.setattr(plan, "MAX_SPLITS", 1)
    tight = PALLAS.plan(case.table, plan_shape(case))
    assert tight.split_keys[0] > plan.SPLIT_KEYS
    assert tight.splits.shape[1] == 4
    np.testing.assert_allclose(attend(case), wanted, atol=1e-6)


def test_a_shape_of_one_token_a_row_may_hold_rows_of_several():
    case = make_case(8, kv_len=[300, 9], query_len=[5, 2])
    shape = plan_shape(case, tokens=8, rows=8)
    np.testing.assert_allclose(attend(case, shape)[:7], dense_answer(case, scale=0.3), atol=1e-5)
