"""The reference provider against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import PagedCase, dense_answer, make_case, plan_shape

from kv_kernels.provider import KernelNeeds, PoolPair, Scoring
from kv_kernels.reference import ReferenceProvider

PROVIDER = ReferenceProvider()


def attend(case: PagedCase, shape, *, scale, window=None, soft_cap=None, dtype="float32") -> np.ndarray:
    q = np.zeros((shape.tokens, *case.q.shape[1:]), np.float32)
    q[: len(case.q)] = case.q
    # In one program, since each operation alone would be compiled for itself.
    out = jax.jit(PROVIDER.paged_attention)(
        jnp.asarray(q, dtype),
        case.pools,
        PROVIDER.plan(case.table, shape),
        first_page=case.layer * case.num_pages,
        scoring=Scoring(np.float32(scale), window, soft_cap),
    )
    return np.asarray(out.astype(jnp.float32))[: len(case.q)]


@st.composite
def ragged_lengths(draw):
    kv_len = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    query_len = [draw(st.one_of(st.just(1), st.integers(1, total))) for total in kv_len]
    return kv_len, query_len


MIXTURES = {
    "lengths": ragged_lengths(),
    "seed": st.integers(0, 99),
    "tokens_per_page": st.sampled_from([1, 3, 16, 64, 200, 256]),
    "heads": st.sampled_from([(1, 1), (4, 2), (6, 2), (5, 1)]),
    "head_dim": st.sampled_from([4, 24]),
    "window": st.sampled_from([None, 1, 7, 130]),
    "soft_cap": st.sampled_from([None, 1.5]),
    "padding": st.integers(0, 9),
}


def check_a_mixture(lengths, seed, tokens_per_page, heads, head_dim, window, soft_cap, padding):
    kv_len, query_len = lengths
    case = make_case(
        seed,
        kv_len=kv_len,
        query_len=query_len,
        tokens_per_page=tokens_per_page,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
    )
    shape = plan_shape(case, tokens=case.table.tokens + padding, rows=case.table.rows)
    got = attend(case, shape, scale=0.3, window=window, soft_cap=soft_cap)
    np.testing.assert_allclose(got, dense_answer(case, scale=0.3, window=window, soft_cap=soft_cap), atol=3e-5)


@settings(max_examples=10, deadline=None)
@given(**MIXTURES)
def test_every_ragged_mixture_equals_dense_attention(**drawn):
    check_a_mixture(**drawn)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(**MIXTURES)
def test_many_ragged_mixtures_equal_dense_attention(**drawn):
    check_a_mixture(**drawn)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_half_precision_pools_differ_only_by_rounding(dtype, bound):
    case = make_case(1, kv_len=[40, 5], query_len=[3, 5], dtype=dtype)
    got = attend(case, plan_shape(case), scale=0.35, dtype=dtype)
    np.testing.assert_allclose(got, dense_answer(case, scale=0.35), atol=bound)


def test_what_no_row_holds_cannot_reach_the_output_even_as_nan():
    lengths = {"kv_len": [1, 15, 16, 17, 33], "query_len": [1, 2, 16, 1, 4]}
    quiet, loud = make_case(3, **lengths, fill=0.0), make_case(3, **lengths, fill=np.nan)
    assert np.isnan(np.asarray(loud.pools.v)).any()
    np.testing.assert_array_equal(attend(quiet, plan_shape(quiet), scale=1), attend(loud, plan_shape(loud), scale=1))


@pytest.mark.usefixtures("fully_optimized")
def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    together = make_case(5, kv_len=[70, 200, 33], query_len=[70, 2, 20])
    got = attend(together, plan_shape(together, tokens=128, rows=8), scale=0.5)
    for row, (k, v) in enumerate(zip(together.k_rows, together.v_rows, strict=True)):
        first, last = together.table.query_start[row : row + 2]
        alone = make_case(6, kv_len=[len(k)], query_len=[int(last - first)])
        pages = alone.table.page_ids
        k_pool, v_pool = (np.array(pool) for pool in alone.pools)
        for position in range(len(k)):
            where = alone.layer * alone.num_pages + pages[position // 16], position % 16
            k_pool[where], v_pool[where] = k[position], v[position]
        alone = alone._replace(q=together.q[first:last], pools=PoolPair(jnp.asarray(k_pool), jnp.asarray(v_pool)))
        shape = plan_shape(alone, tokens=128, rows=2)
        np.testing.assert_array_equal(attend(alone, shape, scale=0.5), got[first:last])


def test_a_scale_is_never_defaulted():
    with pytest.raises(TypeError, match="scale"):
        Scoring()


def test_append_writes_its_slots_and_nothing_else():
    pools = PoolPair(*(jnp.zeros((6, 4, 2, 3)) for _ in range(2)))
    new = jnp.arange(2 * 2 * 3, dtype=jnp.float32).reshape(2, 2, 3) + 1
    after = PROVIDER.append_kv(new, -new, jnp.asarray([9, 22]), pools)
    expected = np.zeros((24, 2, 3), np.float32)
    expected[[9, 22]] = new
    np.testing.assert_array_equal(np.asarray(after.k).reshape(24, 2, 3), expected)
    np.testing.assert_array_equal(np.asarray(after.v).reshape(24, 2, 3), -expected)


@pytest.mark.parametrize("slot", [-1, 24])
def test_append_drops_a_slot_outside_the_pool(slot):
    pools = PoolPair(*(jnp.zeros((6, 4, 2, 3)) for _ in range(2)))
    after = PROVIDER.append_kv(jnp.ones((1, 2, 3)), jnp.ones((1, 2, 3)), jnp.asarray([slot]), pools)
    assert not np.asarray(after.k).any()


def test_append_and_attention_update_the_donated_pools_in_place():
    case = make_case(2, kv_len=[20, 9], query_len=[1, 1], fill=0.0)
    plan = jax.tree.map(jnp.asarray, PROVIDER.plan(case.table, plan_shape(case)))

    def step(pools, q, slots):
        pools = PROVIDER.append_kv(q[:, :2], q[:, :2], slots, pools)
        out = PROVIDER.paged_attention(q, pools, plan, first_page=0, scoring=Scoring(np.float32(1)))
        return pools, out

    # Made on the device: an array over numpy's memory cannot be donated.
    before = PoolPair(*(pool + 0 for pool in case.pools))
    pointer = before.k.unsafe_buffer_pointer()
    pools, _ = jax.jit(step, donate_argnums=0)(before, jnp.asarray(case.q), case.table.write_slots)
    assert pools.k.unsafe_buffer_pointer() == pointer


def test_an_unsupported_pool_dtype_is_named():
    needs = KernelNeeds("cpu", "int8", num_heads=4, num_kv_heads=2, head_dim=8, tokens_per_page=16)
    assert "int8" in PROVIDER.unsupported(needs)
