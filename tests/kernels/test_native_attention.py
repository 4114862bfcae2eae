"""Native append and ragged paged attention against plain numpy, and a row's bits against its company."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_case import AVAILABLE_LEVELS, alone, attend, ragged_lengths, running
from paged_case import build_table, dense_answer, make_case, plan_shape

from kv_kernels.native import NativeProvider
from kv_kernels.provider import PoolPair, Scoring
from kv_kernels.reference import ReferenceProvider

NATIVE = NativeProvider()


MIXTURES = {
    "lengths": ragged_lengths(),
    "level": st.sampled_from(AVAILABLE_LEVELS),
    "seed": st.integers(0, 99),
    "tokens_per_page": st.sampled_from([1, 3, 16, 64, 128]),
    "kv_heads": st.sampled_from([1, 2, 3]),
    "group": st.sampled_from([1, 2, 3, 5, 16]),
    "head_dim": st.sampled_from([24, 64, 80, 100, 256]),
    "window": st.sampled_from([None, 1, 7, 64, 130]),
    "soft_cap": st.sampled_from([None, 1.5, 50.0]),
    "padding": st.integers(0, 9),
}


def check_a_mixture(lengths, level, seed, tokens_per_page, kv_heads, group, head_dim, window, soft_cap, padding):
    kv_len, query_len = lengths
    case = make_case(
        seed,
        kv_len=kv_len,
        query_len=query_len,
        tokens_per_page=tokens_per_page,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=1 if head_dim > 100 else 2,
    )
    shape = plan_shape(case, tokens=case.table.tokens + padding, rows=case.table.rows + padding)
    with running(level=level):
        got = attend(case, shape, scale=0.3, window=window, soft_cap=soft_cap)
    np.testing.assert_allclose(got, dense_answer(case, scale=0.3, window=window, soft_cap=soft_cap), atol=3e-5)


@settings(max_examples=25)
@given(**MIXTURES)
def test_every_ragged_mixture_equals_dense_attention(**drawn):
    check_a_mixture(**drawn)


@pytest.mark.slow
@settings(max_examples=200)
@given(**MIXTURES)
def test_many_ragged_mixtures_equal_dense_attention(**drawn):
    check_a_mixture(**drawn)


OTHER_STEPS = {
    "queries": lambda plan: plan._replace(query_start=plan.query_start[[0, 1, 2]] - np.int32([0, 1, 0])),
    "lengths": lambda plan: plan._replace(kv_len=plan.kv_len - 1),
    "entries": lambda plan: plan._replace(page_start=plan.page_start[::-1]),
    "pages": lambda plan: plan._replace(page_ids=plan.page_ids[[2, 3, 0, 1]]),
    "window": lambda plan: plan,
}


@pytest.mark.parametrize("changed", OTHER_STEPS)
def test_what_a_thread_keeps_of_a_step_does_not_serve_another(changed):
    is_window = changed == "window"
    # Windows choose the splits of long rows.
    case = make_case(5, kv_len=[1200, 1100] if is_window else [20, 20], query_len=[2, 1], layers=1)
    plan = NATIVE.plan(case.table, plan_shape(case, spare_entries=0))
    windows = (600, 1000) if is_window else (None, None)

    @jax.jit
    def one_after_the_other(q, pools, first, second):
        before = NATIVE.paged_attention(q, pools, first, first_page=0, scoring=Scoring(0.3, windows[0], None))
        return NATIVE.paged_attention(
            q + 0 * before, pools, second, first_page=0, scoring=Scoring(0.3, windows[1], None)
        )

    got = one_after_the_other(case.q, case.pools, plan, OTHER_STEPS[changed](plan))
    if changed == "queries":
        case = case._replace(table=build_table([20, 20], [1, 2], [np.zeros(2, int)] * 2, 16))
    elif changed == "lengths":
        case = case._replace(k_rows=[row[:19] for row in case.k_rows], v_rows=[row[:19] for row in case.v_rows])
    elif changed in ("entries", "pages"):
        case = case._replace(k_rows=case.k_rows[::-1], v_rows=case.v_rows[::-1])
    np.testing.assert_allclose(got, dense_answer(case, scale=0.3, window=windows[1]), atol=3e-5)


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_decode_batches_of_any_size_equal_the_reference(rows, level):
    case = make_case(rows, kv_len=list(range(3, 3 + 5 * rows, 5)), query_len=[1] * rows, heads=9, kv_heads=3)
    with running(level=level):
        np.testing.assert_allclose(attend(case), attend(case, provider=ReferenceProvider()), atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 3e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_half_precision_pools_differ_only_by_rounding(level, dtype, bound):
    case = make_case(1, kv_len=[140, 5], query_len=[3, 5], head_dim=24, dtype=dtype)
    with running(level=level):
        np.testing.assert_allclose(attend(case, dtype=dtype), dense_answer(case, scale=0.3), atol=bound)


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_what_no_row_holds_cannot_reach_the_output_even_as_nan(level):
    lengths = {"kv_len": [1, 15, 16, 17, 133], "query_len": [1, 2, 16, 1, 4], "head_dim": 24}
    quiet, loud = make_case(3, **lengths, fill=0.0), make_case(3, **lengths, fill=np.nan)
    with running(level=level):
        np.testing.assert_array_equal(attend(quiet), attend(loud))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_a_nan_that_a_row_does_hold_is_not_hidden(level, dtype):
    case = make_case(3, kv_len=[20, 9], query_len=[1, 1], head_dim=32, dtype=dtype)
    page = case.layer * case.num_pages + int(case.table.page_ids[0])
    with running(level=level):
        got = attend(
            case._replace(pools=PoolPair(case.pools.k.at[page, 2, 0, 0].set(np.nan), case.pools.v)), dtype=dtype
        )
    assert np.isnan(got[0, :2]).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_a_row_has_the_same_bits_alone_in_a_batch_in_chunks_and_at_any_thread_count(level, window):
    together = make_case(5, kv_len=[70, 200, 150], query_len=[70, 1, 100], heads=6, kv_heads=2, head_dim=40)
    with running(level=level, threads=1):
        whole = attend(together, window=window)
    starts = together.table.query_start
    for threads in (1, 2):
        with running(level=level, threads=threads):
            np.testing.assert_array_equal(attend(together, window=window), whole)
            for row, cuts in enumerate(([0, 1, 2, 19, 70], [0, 1], [0, 37, 99, 100])):
                for first, last in itertools.pairwise(cuts):
                    got = attend(alone(together, row, slice(first, last)), window=window)
                    np.testing.assert_array_equal(got, whole[starts[row] + first : starts[row] + last])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_a_long_context_is_shared_out_among_threads_and_keeps_its_bits(level, window):
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 40}
    whole_row = make_case(5, kv_len=[1200], query_len=[1200], **sizes)
    with running(level=level, threads=1):
        whole = attend(whole_row, window=window)
    np.testing.assert_allclose(whole, dense_answer(whole_row, scale=0.3, window=window), atol=3e-5)
    for threads in (1, 2):
        with running(level=level, threads=threads):
            for first, last in ((511, 512), (512, 513), (1000, 1004), (1000, 1005), (1199, 1200)):
                case = alone(whole_row, 0, slice(first, last))
                np.testing.assert_array_equal(attend(case, window=window), whole[first:last])


@pytest.mark.parametrize("tokens_per_page", [16, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_rows_that_share_a_prefix_have_the_bits_that_each_has_alone(level, dtype, tokens_per_page):
    lengths = [(1100, 1), (1030, 1), (1101, 4), (600, 2), (513, 1), (512, 1), (515, 4), (1300, 5), (1100, 1), (513, 4)]
    # Of like length, whose rests are of one split; of other numbers of tokens, and one between them that has no rest.
    lengths += [(514, 2), (1024, 1), (1024, 1), (1000, 1)]
    lengths += [(520 + row, 1) for row in range(40)]  # more than a tile takes
    kv_len, query_len = map(list, zip(*lengths, strict=True))
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": dtype, "tokens_per_page": tokens_per_page, "layers": 1}
    case = make_case(7, kv_len=kv_len, query_len=query_len, **sizes)
    starts, entries = case.table.query_start, case.table.page_indptr
    pages = [case.table.page_ids[first:last].copy() for first, last in itertools.pairwise(entries)]
    for row, shared_tokens in enumerate(
        [0, 1029, 1024, 512, 511, 512, 512, 1024, 600, 512, 512, 512, 1024, 512, *[512] * 20]
    ):
        shared = shared_tokens // tokens_per_page
        pages[row][:shared] = pages[0][:shared]
    together = case._replace(table=build_table(kv_len, query_len, pages, tokens_per_page))
    for threads in (1, 2):
        with running(level=level, threads=threads):
            got = attend(together, dtype=dtype)
            for row in range(len(lengths)):
                table = build_table([kv_len[row]], [query_len[row]], [pages[row]], tokens_per_page)
                mine = slice(starts[row], starts[row + 1])
                lone = attend(case._replace(table=table, q=case.q[mine]), dtype=dtype)
                np.testing.assert_array_equal(got[mine], lone)


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_append_writes_its_slots_and_nothing_else(dtype, pool_dtype):
    pools = PoolPair(*(jnp.zeros((6, 4, 2, 3), pool_dtype) for _ in range(2)))
    new = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 3)), dtype)
    slots = jnp.asarray([9, -1, 24, 22], jnp.int32)  # the second and third are outside
    k, v = NATIVE.append_kv(new, -new, slots, pools)
    expected = (
        jnp.zeros((24, 2, 3), pool_dtype).at[jnp.asarray([9, 22])].set(new[jnp.asarray([0, 3])].astype(pool_dtype))
    )
    np.testing.assert_array_equal(k.reshape(24, 2, 3), expected)
    np.testing.assert_array_equal(v.reshape(24, 2, 3), -expected)


@pytest.mark.usefixtures("fully_optimized")
def test_append_and_attention_update_the_donated_pools_in_place():
    case = make_case(2, kv_len=[20, 9], query_len=[1, 1], fill=0.0)
    plan = NATIVE.plan(case.table, plan_shape(case))

    def step(pools, q, slots):
        def layer(index, carry):
            pools, out = carry
            pools = NATIVE.append_kv(q[:, :2], q[:, :2], slots + index * case.num_pages * 16, pools)
            out += NATIVE.paged_attention(
                q, pools, plan, first_page=index * case.num_pages, scoring=Scoring(np.float32(1))
            )
            return pools, out

        return jax.lax.fori_loop(0, 2, layer, (pools, jnp.zeros_like(q)))

    pools = jax.tree.map(jnp.copy, case.pools)  # memory of jax's own, which it can take over
    pointer = pools.k.unsafe_buffer_pointer()
    compiled = jax.jit(step, donate_argnums=0).lower(pools, case.q, case.table.write_slots).compile()
    pools, _ = compiled(pools, case.q, case.table.write_slots)
    assert pools.k.unsafe_buffer_pointer() == pointer
    shape = ",".join(map(str, pools.k.shape))
    assert not [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line and " copy(" in line]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_ids": np.asarray([1, 99], np.int32)}, r"page \d+ is outside 0 to"),
        ({"page_ids": np.asarray([1], np.int32)}, r"row 0 needs page entries 0 to 2 of 1"),
        ({"kv_len": np.asarray([0], np.int32)}, r"row 0 has kv_len 0 for 1 queries"),
        ({"query_start": np.asarray([0, 7], np.int32)}, r"row 0 has queries 0 to 7 of 1"),
        ({"query_start": np.asarray([1, 1], np.int32)}, r"query_start begins at 1, wanted 0"),
        ({"query_start": np.asarray([0], np.int32)}, r"query_start has shape \[1\], wanted \[2\]"),
        ({"kv_len": np.asarray([20], np.int64)}, r"kv_len is int64, wanted int32"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error_with_the_numbers(changes, message):
    case = make_case(0, kv_len=[20], query_len=[1])
    plan = NATIVE.plan(case.table, plan_shape(case, spare_entries=0))._replace(**changes)
    with jax.enable_x64(True), pytest.raises(jax.errors.JaxRuntimeError, match=message):
        NATIVE.paged_attention(
            jnp.asarray(case.q), case.pools, plan, first_page=0, scoring=Scoring(np.float32(1))
        ).block_until_ready()


@pytest.mark.parametrize(
    ("operands", "aliases", "message"),
    [
        ({}, {}, "a pool is not the same buffer as its result"),
        ({"slots": jnp.zeros((3,), jnp.int32)}, {3: 0, 4: 1}, r"slots has shape \[3\], wanted \[1\]"),
        ({"slots": jnp.zeros((1,))}, {3: 0, 4: 1}, "slots is float32, wanted int32"),
        ({"v_new": jnp.zeros((1, 2, 4))}, {3: 0, 4: 1}, r"v_new has shape \[1, 2, 4\], wanted \[1, 2, 3\]"),
    ],
)
def test_a_bad_append_is_an_error_and_writes_nothing(operands, aliases, message):
    pool = jax.ShapeDtypeStruct((6, 4, 2, 3), jnp.float32)
    operands = {
        "k_new": jnp.ones((1, 2, 3)),
        "v_new": jnp.ones((1, 2, 3)),
        "slots": jnp.zeros((1,), jnp.int32),
        "k": jnp.zeros(pool.shape),
        "v": jnp.zeros(pool.shape),
    } | operands
    call = jax.ffi.ffi_call("jaxkv_append_kv", [pool, pool], input_output_aliases=aliases)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*operands.values()))
