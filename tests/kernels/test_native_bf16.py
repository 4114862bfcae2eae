"""Products and attention of bfloat16 activations: rounded operands on levels made for them, else exact ones.

What holds at every level is that a token's bits do not depend on its company. The AMX level multiplies values rounded
to bfloat16 and sums in float32; so does the level below, but where weights have integers it takes activations as
integers of 16 bits a block. A float64 model with the same roundings shows both to float32's errors.
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_case import AVAILABLE_LEVELS, DENSE_KINDS, QUANT_KINDS, alone, ragged_lengths, random_weight, running
from native_case import attend as attend_in
from paged_case import build_table, dense_answer, make_case

from kv_kernels.dequantize import dequantize
from kv_kernels.native import NativeProvider
from kv_kernels.provider import PoolPair
from kv_kernels.weights import BLOCK_SIZE, BlockQuantWeight, take_layer

NATIVE = NativeProvider()
KINDS = (*DENSE_KINDS, *QUANT_KINDS)
INTEGER_KINDS = ("q8_0", "q4_0", "q4_1", "q4_k", "q4_1/groups", "q4_0/tiles", "q4_1/tiles")
"""Whose quants the integer instructions multiply."""
values_of = jax.jit(lambda weight: dequantize(weight, jnp.float32))


def rounded(values: np.ndarray | jax.Array) -> np.ndarray:
    return np.asarray(jnp.asarray(values, jnp.bfloat16).astype(jnp.float32), np.float64)


def in_integers(x: np.ndarray) -> np.ndarray:
    """x [tokens, in] rounded to integers of 16 bits times a power of two, the same for 32 numbers."""
    blocks = x.reshape(len(x), x.shape[1] // BLOCK_SIZE, BLOCK_SIZE)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    exponent = np.frexp(largest * (128 / 127))[1] - 1
    step = np.ldexp(1.0, exponent - 14)
    return (np.rint(blocks / step) * step).reshape(x.shape)


def activations(seed: int, tokens: int, features: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, features)), jnp.bfloat16)


PRODUCTS = {
    "kind": st.sampled_from(KINDS),
    "level": st.sampled_from(AVAILABLE_LEVELS),
    "tokens": st.one_of(st.integers(0, 40), st.integers(250, 270)),
    "out_features": st.integers(1, 150),
    "in_features": st.one_of(st.integers(1, 200), st.integers(600, 1400)),
    "seed": st.integers(0, 99),
}


def check_a_product(kind, level, tokens, out_features, in_features, seed):
    weight = random_weight(seed, kind, 2, out_features=out_features, in_features=in_features)
    x = activations(seed, tokens, weight.in_features)
    with running(level=level):
        got = np.asarray(NATIVE.product(x, weight, 1, jnp.float32), np.float64)
    matrix = values_of(take_layer(weight, 1))
    x = np.asarray(x.astype(jnp.float32), np.float64)
    in_vectors = level == "avx512_bf16"
    if in_vectors and kind in INTEGER_KINDS:
        x = in_integers(x)
    is_rounded = level == "amx" or (in_vectors and kind not in INTEGER_KINDS)
    matrix = rounded(matrix) if is_rounded else np.asarray(matrix, np.float64)
    # bfloat16 of a value that lies between two of them may be either where the value was rounded to float32 before.
    ties = 2**-24 if is_rounded and kind not in DENSE_KINDS else 0
    assert (np.abs(got - x @ matrix.T) <= (5e-7 + ties) * (np.abs(x) @ np.abs(matrix).T)).all()


def in_bytes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [tokens, in] float32 rounded to whole 127ths of the largest of 32 numbers, and the sums of each 32."""
    blocks = x.reshape(len(x), x.shape[1] // BLOCK_SIZE, BLOCK_SIZE)
    scale = np.float32(127) / np.abs(blocks).max(axis=-1, keepdims=True)
    digits, step = np.rint(blocks * scale), np.float32(1) / scale
    return np.asarray((digits * step).reshape(x.shape), np.float64), digits.sum(axis=-1) * step[..., 0]


def in_the_middle(weight: BlockQuantWeight) -> np.ndarray:
    """What a quant of four bits comes to that is 8, of every block: [out, blocks] float32."""
    middle = dataclasses.replace(weight, quants=jnp.full_like(weight.quants, 0x88))
    return np.asarray(values_of(middle))[:, ::BLOCK_SIZE]


@pytest.mark.skipif("avx512_bf16" not in AVAILABLE_LEVELS, reason="this CPU has no AVX-512 with VNNI and bfloat16")
@pytest.mark.parametrize("kind", INTEGER_KINDS)
@pytest.mark.parametrize("in_features", [32, 640, 1248])
@pytest.mark.parametrize("tokens", [1, 3, 7, 40])
def test_activations_of_eight_bits_are_rounded_as_said_and_nothing_else_is(kind, in_features, tokens):
    weight = random_weight(3, kind, 2, out_features=70, in_features=in_features)
    x = np.asarray(activations(tokens, tokens, in_features), np.float32)
    native = NativeProvider(int8_activations=True)
    with running(level="avx512_bf16"):
        got = np.asarray(native.product(jnp.asarray(x), weight, 1, jnp.float32), np.float64)
    layer = take_layer(weight, 1)
    matrix, (met, sums) = np.asarray(values_of(layer), np.float64), in_bytes(x)
    expected = met @ matrix.T
    if kind != "q8_0":  # quants count as -8 to 7, and what that leaves of the mins meets the sums in bfloat16
        rest = in_the_middle(layer)
        expected += rounded(sums) @ rounded(rest).T - np.asarray(sums, np.float64) @ np.asarray(rest, np.float64).T
    assert (np.abs(got - expected) <= 5e-7 * (np.abs(met) @ np.abs(matrix).T)).all()
    assert np.abs(got - x @ matrix.T).max() > 1e-3  # it does round


@settings(max_examples=12)
@given(**PRODUCTS)
def test_the_sum_of_products_has_the_errors_of_float32(**drawn):
    check_a_product(**drawn)


@pytest.mark.slow
@settings(max_examples=100)
@given(**PRODUCTS)
def test_many_sums_of_products_have_the_errors_of_float32(**drawn):
    check_a_product(**drawn)


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", ["bfloat16", "q8_0", "q4_1", "q6_k"])
@pytest.mark.parametrize("number", [np.inf, np.nan])
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("native", [NATIVE, NativeProvider(int8_activations=True)], ids=["as it is", "int8"])
def test_a_number_that_is_not_finite_shows_in_its_token_alone(kind, level, tokens, number, native):
    weight = random_weight(5, kind, out_features=40, in_features=96)
    x = activations(6, tokens, 96)
    with running(level=level):
        clean = np.asarray(native.product(x, weight, None, jnp.float32))
        got = np.asarray(native.product(x.at[1, 50].set(number), weight, None, jnp.float32))
    others = np.arange(tokens) != 1
    np.testing.assert_array_equal(got[others], clean[others])
    assert not np.isfinite(got[1]).any()


attend = partial(attend_in, dtype="bfloat16", scale=0.25)


MIXTURES = {
    "lengths": ragged_lengths(),
    "seed": st.integers(0, 99),
    "tokens_per_page": st.sampled_from([1, 3, 16, 128]),
    "kv_heads": st.sampled_from([1, 3]),
    "group": st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16]),
    "head_dim": st.sampled_from([24, 32, 64, 96, 256]),
    "window": st.sampled_from([None, 1, 7, 64, 130]),
    "soft_cap": st.sampled_from([None, 5.0]),
}


def check_a_mixture(lengths, seed, tokens_per_page, kv_heads, group, head_dim, window, soft_cap):
    case = make_case(
        seed,
        kv_len=lengths[0],
        query_len=lengths[1],
        tokens_per_page=tokens_per_page,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
    )
    expected = dense_answer(case, scale=0.25, window=window, soft_cap=soft_cap)
    # A weight's rounding is at most 2^-9 of it, the result's 2^-9 of the result, and no value is larger than this.
    largest = max(np.abs(rows).max() for rows in case.v_rows)
    np.testing.assert_allclose(attend(case, window=window, soft_cap=soft_cap), expected, atol=2**-8 * largest)


@settings(max_examples=8)
@given(**MIXTURES)
def test_every_ragged_mixture_equals_dense_attention_to_bfloat16(**drawn):
    check_a_mixture(**drawn)


@pytest.mark.slow
@settings(max_examples=80)
@given(**MIXTURES)
def test_many_ragged_mixtures_equal_dense_attention_to_bfloat16(**drawn):
    check_a_mixture(**drawn)


def test_what_no_row_holds_cannot_reach_the_output_even_as_nan():
    lengths = {"kv_len": [1, 15, 16, 17, 133], "query_len": [1, 2, 16, 1, 4], "head_dim": 64, "dtype": "bfloat16"}
    quiet, loud = make_case(3, **lengths, fill=0.0), make_case(3, **lengths, fill=np.nan)
    np.testing.assert_array_equal(attend(quiet), attend(loud))


@pytest.mark.parametrize(
    ("window", "head_dim", "group"),
    [(None, 64, 3), (33, 64, 3), (32, 64, 2), (None, 40, 3), (None, 96, 1), (33, 128, 8), (None, 192, 5), (9, 32, 16)],
)
def test_a_row_has_the_same_bits_alone_in_a_batch_in_chunks_and_at_any_thread_count(window, head_dim, group):
    sizes = {"heads": 2 * group, "kv_heads": 2, "head_dim": head_dim, "dtype": "bfloat16"}
    together = make_case(5, kv_len=[70, 200, 150], query_len=[70, 1, 100], **sizes)
    with running(threads=1):
        whole = attend(together, window=window)
    starts = together.table.query_start
    for threads in (1, 2):
        with running(threads=threads):
            np.testing.assert_array_equal(attend(together, window=window), whole)
            for row, cuts in enumerate(([0, 1, 2, 19, 70], [0, 1], [0, 37, 99, 100])):
                for first, last in itertools.pairwise(cuts):
                    got = attend(alone(together, row, slice(first, last)), window=window)
                    np.testing.assert_array_equal(got, whole[starts[row] + first : starts[row] + last])


@pytest.mark.parametrize(
    ("window", "position"), [(None, 20), (8, 13)], ids=["the newest key", "the oldest in the window"]
)
def test_an_infinite_value_beside_a_key_that_is_not_seen_is_no_nan(window, position):
    case = make_case(5, kv_len=[23], query_len=[3], heads=6, head_dim=64, dtype="bfloat16")
    page = case.layer * case.num_pages + int(case.table.page_ids[position // 16])
    values = np.array(case.v_rows[0])
    values[position, 0, 0] = np.inf
    pools = PoolPair(case.pools.k, case.pools.v.at[page, position % 16, 0, 0].set(np.inf))
    case = case._replace(v_rows=[values], pools=pools)
    whole = attend(case, window=window)
    assert np.isposinf(whole[0, :3, 0]).all()  # of the query heads of that K/V head
    np.testing.assert_array_equal(attend(alone(case, 0, slice(0, 1)), window=window), whole[:1])


def test_a_decode_has_the_same_bits_among_many_whose_heads_are_taken_together():
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    lengths = [5, 700, 64, 65, 130, 1100, 1, 90, 200, 33]
    together = make_case(7, kv_len=lengths, query_len=[1] * len(lengths), **sizes)
    with running(threads=1):  # heads are taken apart where threads would be without work
        whole = attend(together)
    for row in range(len(lengths)):
        np.testing.assert_array_equal(attend(alone(together, row, slice(0, 1))), whole[row : row + 1])


def test_a_prompt_has_the_bits_that_its_tokens_have_one_by_one():
    # So many that sums in another order, equal to all but the last bit of float32, would round to some other bfloat16.
    tokens = 500
    sizes = {"heads": 16, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16", "layers": 1}
    whole = make_case(3, kv_len=[tokens], query_len=[tokens], **sizes)
    pages = whole.table.page_ids
    lengths = range(1, tokens + 1)
    table = build_table(list(lengths), [1] * tokens, [pages[: -(-length // 16)] for length in lengths], 16)
    np.testing.assert_array_equal(attend(whole._replace(table=table)), attend(whole))
