"""The native fused passes against their definition, `ComposedKernels`, and a token's bits against its company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_case import AVAILABLE_LEVELS, DENSE_KINDS, FEW_QUANT_KINDS, random_weight, running
from paged_case import make_case, plan_shape
from test_native_linear import activations, assert_close, call_linear

from kv_kernels.composition import ComposedKernels
from kv_kernels.native import NativeProvider
from kv_kernels.provider import Affine, CacheAttended, Norm, Placement, PoolPair, Rotation, Scoring
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import DenseWeight

NATIVE, REFERENCE = NativeProvider(), ReferenceProvider()
KINDS = (*DENSE_KINDS, *FEW_QUANT_KINDS)


def affine(seed: int, kind: str, out_features: int, in_features: int, bias: bool, layers: int = 2) -> Affine:
    weight = random_weight(seed, kind, layers, out_features=out_features, in_features=in_features)
    return Affine(weight, activations(seed + 1, layers, weight.out_features) if bias else None)


@functools.partial(jax.jit, static_argnames=("eps", "activation"))
def definition(x, matrices, norm_weight, *, eps=1e-5, activation=None):
    """What the reference gives, compiled as one: operation by operation it takes ten times as long."""
    norm = None if norm_weight is None else Norm(norm_weight, eps)
    return REFERENCE.linear(x, matrices, 1, norm=norm, activation=activation)


def norm_of(seed: int, features: int, layers: int = 2) -> Norm:
    return Norm(1 + activations(seed, layers, features) / 4, 1e-5)


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "normed"), [(0, True), (3, False), (3, True), (37, True)])
def test_products_that_share_their_activations(kind, level, tokens, normed):
    matrices = [affine(2 * size, kind, size, 320, bias=size != 33) for size in (75, 1, 33)]
    x, norm = activations(3, tokens, 320), norm_of(4, 320) if normed else None
    with running(level=level):
        got = NATIVE.linear(x, matrices, 1, norm=norm)
    expected = definition(x, matrices, norm and norm.weight)
    assert len(got) == len(matrices)
    for mine, theirs in zip(got, expected, strict=True):
        assert_close(mine, np.asarray(theirs, np.float64), 1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_product(kind, level, activation):
    gate, up = affine(1, kind, 75, 320, bias=True), affine(2, kind, 75, 320, bias=False)
    x, norm = activations(3, 37, 320) * 3, norm_of(4, 320)
    with running(level=level):
        (got,) = NATIVE.linear(x, (gate, up), 1, norm=norm, activation=activation)
    (expected,) = definition(x, (gate, up), norm.weight, activation=activation)
    assert_close(got, np.asarray(expected, np.float64), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_a_residual_is_added_before_the_only_rounding(level, dtype):
    matrix, x = affine(5, "q4_1", 75, 320, bias=True), activations(6, 9, 320, dtype)
    residual = activations(7, 9, 75, dtype)
    with running(level=level):
        (got,) = NATIVE.linear(x, (matrix,), 1, residual=residual)
        (product,) = NATIVE.linear(x, (matrix,), 1, out_dtype=jnp.float32)
    assert got.dtype == residual.dtype
    np.testing.assert_array_equal(got, (product + residual.astype(jnp.float32)).astype(dtype))


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", ["float32", "q4_1"])
def test_a_token_has_the_same_bits_in_any_batch_and_at_any_thread_count(kind, level):
    gate, up = affine(1, kind, 75, 1600, bias=False), affine(2, kind, 75, 1600, bias=False)
    x, norm, residual = activations(3, 200, 1600), norm_of(4, 1600), activations(5, 200, gate.weight.out_features)

    def passes(first: int, last: int) -> list[jax.Array]:
        part = x[first:last]
        return [
            *NATIVE.linear(part, (gate, up), 1, norm=norm),
            *NATIVE.linear(part, (gate, up), 1, norm=norm, activation="silu"),
            *NATIVE.linear(part, (up,), 1, residual=residual[first:last]),
        ]

    with running(level=level, threads=1):
        whole = [np.asarray(each) for each in passes(0, 200)]
    for threads in (1, 2):
        with running(level=level, threads=threads):
            for first, last in ((0, 1), (5, 7), (8, 41), (3, 100), (0, 200), (199, 200)):
                for mine, theirs in zip(passes(first, last), whole, strict=True):
                    np.testing.assert_array_equal(mine, theirs[first:last])


def finished(x: jax.Array, gate: Affine, up: Affine, residual: jax.Array) -> list[jax.Array]:
    """A product with its bias, and a gated one; each with a residual and without."""
    residuals = (None, residual)
    return [
        *(NATIVE.linear(x, (up,), 1, residual=each)[0] for each in residuals),
        *(NATIVE.linear(x, (gate, up), 1, activation="silu", residual=each)[0] for each in residuals),
    ]


NARROW_COUNTS = (*range(1, 34), 40, 100, 300)


@jax.jit
def finished_of_some(x: jax.Array, gate: Affine, up: Affine, residual: jax.Array) -> list[list[jax.Array]]:
    """Of the last so many tokens, in one program."""
    return [finished(x[-tokens:], gate, up, residual[-tokens:]) for tokens in NARROW_COUNTS]


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", ["bfloat16", "q8_0", "q4_1"])
def test_what_is_finished_in_bfloat16_has_the_same_bits_in_any_batch_and_at_any_thread_count(kind, level):
    gate, up = affine(1, kind, 75, 736, bias=True), affine(3, kind, 75, 736, bias=True)
    # Gates of all signs and sizes: with far larger ones a gate is its sign alone.
    x, residual = activations(5, 300, 736, "bfloat16") / 16, activations(6, 300, 75, "bfloat16")
    with running(level=level, threads=1):
        whole = [np.asarray(each) for each in finished(x, gate, up, residual)]
        added = NATIVE.linear(x, (up,), 1, out_dtype=jnp.float32)[0] + residual.astype(jnp.float32)
    np.testing.assert_array_equal(whole[1], added.astype(jnp.bfloat16))
    for threads in (1, 2):
        with running(level=level, threads=threads):
            for tokens, some in zip(NARROW_COUNTS, finished_of_some(x, gate, up, residual), strict=True):
                for mine, theirs in zip(some, whole, strict=True):
                    np.testing.assert_array_equal(mine, theirs[-tokens:])


def activated(activation: str, x: np.ndarray) -> np.ndarray:
    z = x if activation == "silu" else np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-z))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize(("features", "outputs"), [(32, 16), (37, 75), (96, 33)])
def test_a_gate_in_bfloat16_has_the_errors_of_its_rounding_alone(level, activation, features, outputs):
    sizes = [0.0, *np.geomspace(1e-3, 90, 150), 100.0, 1e4, 1e20]
    x = np.zeros((2 * len(sizes) + 1, features), np.float32)
    x[:, 0] = np.asarray(jnp.asarray([*sizes, *np.negative(sizes), np.nan], jnp.bfloat16), np.float32)
    # The gate is the first number and the bias, and what it multiplies the last: sums of one term are exact.
    x[:, -1] = np.linspace(1, 3, len(x)).astype(jnp.bfloat16)
    one, last = np.zeros((2, outputs, features), np.float32)
    one[:, 0], last[:, -1] = 1, np.linspace(-2, 2, outputs).astype(jnp.bfloat16)
    bias = np.linspace(-1, 1, outputs).astype(np.float32)
    gate = Affine(DenseWeight(jnp.asarray(one, jnp.bfloat16)), jnp.asarray(bias))
    up = Affine(DenseWeight(jnp.asarray(last, jnp.bfloat16)), None)
    with running(level=level):
        (got,) = NATIVE.linear(jnp.asarray(x, jnp.bfloat16), (gate, up), None, activation=activation)
    got, wide = np.asarray(got, np.float64), x.astype(np.float64)
    expected = activated(activation, (x[:, :1] + bias).astype(np.float64)) * (wide @ last.T.astype(np.float64))
    assert np.isnan(got[-1]).all()
    # Half a step of bfloat16, and the few roundings of float32 or a guess of 14 bits before it.
    np.testing.assert_allclose(got[:-1], expected[:-1], rtol=2**-8 + 2**-13, atol=1e-35)


def test_weights_of_different_kinds_may_share_their_activations():
    matrices = (affine(1, "q4_1", 40, 320, bias=False), affine(2, "q8_0", 24, 320, bias=True))
    x, norm = activations(3, 5, 320), norm_of(4, 320)
    got = NATIVE.linear(x, matrices, 1, norm=norm)
    for mine, theirs in zip(got, REFERENCE.linear(x, matrices, 1, norm=norm), strict=True):
        assert_close(mine, np.asarray(theirs, np.float64), 1e-5)


def test_bad_operands_of_a_pass_are_errors_with_the_numbers():
    x, layer = activations(0, 3, 64), jnp.zeros((), jnp.int32)
    weight, other = activations(1, 8, 64), activations(2, 9, 64)
    result = jax.ShapeDtypeStruct((3, 8), jnp.float32)
    two = {"kinds": "dense,dense"}
    for operands, results, attributes, message in (
        ([jnp.ones(63), weight], [result], {"norm_eps": np.float32(0)}, r"norm has shape \[63\], wanted 64 numbers"),
        ([weight, jnp.ones(7)], [result], {"kinds": "dense+bias"}, r"bias has shape \[7\], wanted 8 numbers"),
        ([jnp.ones((2, 8)), weight], [result], {"has_residual": True}, r"residual has shape \[2, 8\], wanted \[3, 8\]"),
        ([weight, other], [result, result], two, r"result has shape \[3, 8\], wanted \[3, 9\]"),
        ([weight, other], [result], two | {"activation": "silu"}, "a gated product takes two weights of one size"),
        ([weight, weight], [result], two | {"activation": "tanh"}, "activation tanh is not silu or gelu_tanh"),
        ([weight, weight], [result], two, "1 results for 2"),
        ([weight, weight], [result], {}, "2 parts are given, 1 are called for"),
        ([], [result], {}, "weight is missing"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call_linear(x, layer, *operands, results=results, **attributes)


def attend_case(seed: int, dtype: str, head_dim: int, pairs: int, group: int):
    """A step of three rows with a page to clear and a page to copy, in the second of two layers."""
    case = make_case(
        seed, kv_len=[20, 40, 9], query_len=[1, 33, 9], heads=2 * group, kv_heads=2, head_dim=head_dim, dtype=dtype
    )
    tokens = case.table.tokens
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.standard_normal((tokens, 2, head_dim)), dtype) for _ in range(2))
    angles = rng.uniform(0, 6, (tokens, pairs)).astype(np.float32)
    spare = [page for page in range(1, case.num_pages) if page not in set(case.table.page_ids.tolist())]
    row_two = int(case.table.page_ids[case.table.page_indptr[2]])
    placement = Placement(
        jnp.asarray(case.table.write_slots),
        jnp.asarray([row_two, -1], jnp.int32),
        jnp.asarray([int(case.table.page_ids[0]), 0], jnp.int32),
        jnp.asarray([spare[0] if spare else -1, -1], jnp.int32),
    )
    return case, k, v, Rotation(jnp.cos(angles), jnp.sin(angles)), placement


def cache_pass(provider, *sizes: object) -> CacheAttended:
    """Of the case with these sizes; the definition compiled as one, the native pass as the calls it is."""
    case, k, v, by, placement = attend_case(1, *sizes)
    kernels = ComposedKernels if provider is REFERENCE else NativeProvider
    attend = functools.partial(
        *(kernels.attend, provider),
        **{"layer": case.layer, "num_pages": case.num_pages, "scoring": Scoring(np.float32(0.3)), "rotation": by},
    )
    pools = PoolPair(*(jnp.copy(pool) for pool in case.pools))
    plan = jax.tree.map(jnp.asarray, provider.plan(case.table, plan_shape(case)))
    q = jnp.asarray(case.q, case.pools.k.dtype)
    return (jax.jit(attend) if provider is REFERENCE else attend)(q, k, v, pools, placement, plan)


@functools.cache
def defined_cache_pass(*sizes: object) -> CacheAttended:
    """One for all instruction sets."""
    return cache_pass(REFERENCE, *sizes)


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "pairs", "group", "bound"),
    [
        ("float32", 64, 32, 3, 3e-5),
        ("float32", 40, 10, 2, 3e-5),
        ("float32", 24, 0, 1, 3e-5),
        ("bfloat16", 64, 32, 3, 6e-2),
    ],
)
def test_the_cache_pass_equals_its_definition(level, dtype, head_dim, pairs, group, bound):
    with running(level=level):
        got = cache_pass(NATIVE, dtype, head_dim, pairs, group)
    expected = defined_cache_pass(dtype, head_dim, pairs, group)
    for mine, theirs in (
        (got.values, expected.values),
        (got.pools.k, expected.pools.k),
        (got.pools.v, expected.pools.v),
    ):
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), atol=bound)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p._replace(scrub_pages=jnp.asarray([999], jnp.int32)), "page to clear 999 is outside 0 to"),
        (lambda p: p._replace(copy_targets=jnp.asarray([999, -1], jnp.int32)), "page to copy to 999 is outside 0 to"),
        (lambda p: p._replace(copy_sources=jnp.zeros(3, jnp.int32)), r"copy_sources has shape \[3\], wanted \[2\]"),
        (lambda p: p._replace(slots=p.slots[1:]), r"slots has shape \[42\], wanted \[43\]"),
    ],
)
def test_a_placement_that_does_not_fit_is_an_error_with_the_numbers(change, message):
    case, k, v, by, placement = attend_case(1, "float32", 40, 10, 2)
    if case.num_pages < 9:
        pytest.fail("the case has no spare page")
    plan = NATIVE.plan(case.table, plan_shape(case))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            NATIVE.attend(
                *(jnp.asarray(case.q), k, v, case.pools, change(placement), plan),
                layer=0,
                num_pages=case.num_pages,
                scoring=Scoring(np.float32(1)),
                rotation=by,
            )
        )


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("used", [0, 1, 37, 50])
def test_tokens_that_are_not_used_are_neither_read_nor_multiplied(used, dtype, level):
    gate, up = affine(1, "q4_1", 75, 320, bias=True), affine(2, "q4_1", 75, 320, bias=False)
    x, norm, residual = (
        activations(3, 50, 320, dtype),
        norm_of(4, 320),
        activations(5, 50, up.weight.out_features, dtype),
    )
    loud = x.at[used:].set(np.nan)

    def passes(x: jax.Array, tokens: int, **some) -> list[jax.Array]:
        return [
            *NATIVE.linear(x, (gate, up), 1, norm=norm, **some),
            *NATIVE.linear(x, (gate, up), 1, activation="silu", **some),
            *NATIVE.linear(x, (up,), 1, residual=residual[:tokens], **some),
        ]

    with running(level=level):
        for alone, got in zip(passes(x[:used], used), passes(loud, 50, used=jnp.int32(used)), strict=True):
            np.testing.assert_array_equal(got[:used], alone)
            assert not np.asarray(got[used:], np.float32).any()


@functools.cache
def defined_norm(dtype: str, tokens: int, features: int) -> jax.Array:
    x, norm = activations(3, tokens, 3 * features, dtype).reshape(tokens, 3, features), norm_of(4, features)
    return REFERENCE.normalize(x, norm, 1)


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("features", [64, 75, 576])
def test_a_norm_by_itself_has_the_same_bits_at_any_number_of_rows(features, dtype, bound, level):
    x, norm = activations(3, 90, 3 * features, dtype).reshape(90, 3, features), norm_of(4, features)
    with running(level=level, threads=1):
        whole = NATIVE.normalize(x, norm, 1)
    assert (whole.shape, whole.dtype) == (x.shape, x.dtype)
    assert_close(whole, np.asarray(defined_norm(dtype, 90, features), np.float64), bound)
    with running(level=level):
        np.testing.assert_array_equal(NATIVE.normalize(x, norm, 1), whole)
        for rows in (0, 1, 7):
            np.testing.assert_array_equal(NATIVE.normalize(x[:rows], norm, 1), whole[:rows])


def test_a_norm_of_another_size_is_an_error_with_the_numbers():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"norm has shape .* wanted 64 numbers a layer"):
        NATIVE.normalize(activations(3, 2, 64), norm_of(4, 63), 1).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer 2 is outside 0 to 1"):
        NATIVE.normalize(activations(3, 2, 64), norm_of(4, 64), 2).block_until_ready()


def test_keys_of_other_tokens_than_the_queries_are_an_error():
    case, k, v, by, placement = attend_case(1, "float32", 64, 32, 3)
    pools = PoolPair(*(jnp.copy(pool) for pool in case.pools))
    plan = NATIVE.plan(case.table, plan_shape(case))
    more = (jnp.concatenate([each, each]) for each in (k, v))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"k has shape \[86, .*wanted \[43, any, any\]"):
        jax.block_until_ready(
            NATIVE.attend(
                *(jnp.asarray(case.q), *more, pools, placement, plan),
                **{"layer": 0, "num_pages": case.num_pages, "scoring": Scoring(np.float32(1)), "rotation": by},
            )
        )
