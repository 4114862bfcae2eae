"""The native weight product against the reference, and a token's bits against its company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_case import AVAILABLE_LEVELS, DENSE_KINDS, FEW_QUANT_KINDS, QUANT_KINDS, random_weight, running

from kv_kernels.dequantize import dequantize
from kv_kernels.native import NativeProvider
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import DenseWeight, MixedWeight, take_layer

NATIVE, REFERENCE = NativeProvider(), ReferenceProvider()
values_of = jax.jit(lambda weight: dequantize(weight, jnp.float32))
KINDS = (*DENSE_KINDS, *QUANT_KINDS)


def activations(seed: int, tokens: int, features: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, features), np.float32), dtype)


def exact(x: jax.Array, weight, layer: int | None) -> np.ndarray:
    matrix = values_of(weight if layer is None else take_layer(weight, layer))
    return np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T


def assert_close(got, expected, bound: float) -> None:
    """Within `bound` of the largest number of the result."""
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound * max(1.0, np.abs(expected).max(initial=0)))


def assert_as_exact_as_float32(got, x: jax.Array, weight, layer: int | None = None) -> None:
    """Within a few roundings of the sum of the sizes of all terms, whatever they add up to."""
    matrix = np.abs(np.asarray(values_of(weight if layer is None else take_layer(weight, layer))))
    sizes = np.abs(np.asarray(x, np.float64)) @ matrix.astype(np.float64).T
    assert (np.abs(np.asarray(got, np.float64) - exact(x, weight, layer)) <= 5e-7 * sizes).all()


def call_linear(x, layer, *parts, results, used=None, **attributes) -> None:
    """The handler itself, so that operands can be wrong."""
    defaults = {"kinds": "dense", "norm_eps": np.float32(-1), "has_residual": False, "activation": "", "int8_x": False}
    used = jnp.int32(len(x)) if used is None else used
    jax.block_until_ready(jax.ffi.ffi_call("jaxkv_linear", results)(x, layer, used, *parts, **defaults | attributes))


PRODUCTS = {
    "kind": st.sampled_from(KINDS),
    "level": st.sampled_from(AVAILABLE_LEVELS),
    "tokens": st.integers(0, 33),
    "out_features": st.integers(1, 150),
    "in_features": st.one_of(st.integers(1, 200), st.integers(700, 1700)),
    "layers": st.sampled_from([None, 1, 3]),
    "seed": st.integers(0, 99),
}


def check_a_product(kind, level, tokens, out_features, in_features, layers, seed):
    stack, layer = ((), None) if layers is None else ((layers,), layers - 1)
    weight = random_weight(seed, kind, *stack, out_features=out_features, in_features=in_features)
    x = activations(seed, tokens, weight.in_features)
    with running(level=level):
        got = NATIVE.product(x, weight, layer, None)
    assert_as_exact_as_float32(got, x, weight, layer)


@settings(max_examples=25)
@given(**PRODUCTS)
def test_every_size_and_kind_equals_plain_multiplication(**drawn):
    check_a_product(**drawn)


@pytest.mark.slow
@settings(max_examples=200)
@given(**PRODUCTS)
def test_many_sizes_and_kinds_equal_plain_multiplication(**drawn):
    check_a_product(**drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_the_reference(kind):
    weight = random_weight(1, kind, 2, out_features=96, in_features=320)
    x = activations(2, 7, 320)
    assert_close(NATIVE.product(x, weight, 1, None), np.asarray(REFERENCE.product(x, weight, 1, None)), 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2**-8), ("float16", 2**-11)])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", ["float32", "q4_1"])
def test_half_width_activations_are_rounded_once_at_the_end(kind, level, dtype, bound):
    weight = random_weight(3, kind, out_features=50, in_features=256)
    x = activations(4, 9, 256, dtype)
    with running(level=level):
        wide, narrow = NATIVE.product(x, weight, None, jnp.float32), NATIVE.product(x, weight, None, None)
        assert (wide.dtype, narrow.dtype) == (jnp.float32, x.dtype)
        np.testing.assert_array_equal(narrow, wide.astype(dtype))
    assert_close(narrow, exact(x, weight, None), bound)


# Around every width that a kernel takes tokens in; all others are slow tests.
TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 49, 97, 257, 300)
MORE_TOKEN_COUNTS = tuple({*range(1, 34), 96, 200, 256} - {*TOKEN_COUNTS})


def some_tokens(tokens: int) -> slice:
    """So many of 300."""
    first = 7 * tokens % (301 - tokens)
    return slice(first, first + tokens)


@functools.partial(jax.jit, static_argnames=("native", "counts"))
def products_of_some(native: NativeProvider, x: jax.Array, weight, counts: tuple[int, ...]) -> list[jax.Array]:
    """In one program, since each number of tokens would be compiled for itself."""
    return [native.product(x[some_tokens(tokens)], weight, 1, jnp.float32) for tokens in counts]


@jax.jit
def products_of_each(x: jax.Array, weights) -> list[jax.Array]:
    """In one program as well."""
    return [NATIVE.product(x, weight, None, None) for weight in weights]


@pytest.mark.parametrize(
    "counts", [TOKEN_COUNTS, pytest.param(MORE_TOKEN_COUNTS, marks=pytest.mark.slow)], ids=["few", "more"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_alone_in_any_batch_and_at_any_thread_count(kind, level, dtype, counts):
    weight = random_weight(5, kind, 2, out_features=75, in_features=1600)
    native = NativeProvider(int8_activations=dtype == "int8")
    x = activations(6, 300, weight.in_features, "float32" if dtype == "int8" else dtype)
    with running(level=level, threads=1):
        whole = np.asarray(native.product(x, weight, 1, jnp.float32))
    for threads in (1, 2):
        with running(level=level, threads=threads):
            for tokens, some in zip(counts, products_of_some(native, x, weight, counts), strict=True):
                np.testing.assert_array_equal(some, whole[some_tokens(tokens)])


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", [*DENSE_KINDS, *FEW_QUANT_KINDS])
@pytest.mark.parametrize(("tokens", "in_features"), [(1, 576), (5, 64), (20, 1536)])
def test_any_number_of_outputs_has_the_errors_of_float32(kind, level, tokens, in_features):
    sizes = (1, 15, 16, 17, 40)
    weights = [random_weight(size, kind, out_features=size, in_features=in_features) for size in sizes]
    x = activations(tokens, tokens, in_features)
    with running(level=level):
        products = products_of_each(x, weights)
    for product, weight in zip(products, weights, strict=True):
        assert_as_exact_as_float32(product, x, weight)


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", QUANT_KINDS)
@pytest.mark.parametrize("tokens", [2, 9])
def test_numbers_of_any_size_are_kept_to_a_fraction_of_the_largest_in_their_block(kind, level, tokens):
    weight = random_weight(14, kind, out_features=48, in_features=320)
    x = np.asarray(activations(15, tokens, 320)).reshape(tokens, 10, 32)
    x = x * np.float32(10.0) ** np.asarray([-45, -36, -25, -12, -3, 0, 3, 12, 20, 30], np.float32)[:, None]
    x[..., 7] *= 1000
    x = x.reshape(tokens, 320)
    matrix = np.asarray(values_of(weight), np.float64)
    largest = np.abs(x).reshape(tokens, 10, 32).max(-1, keepdims=True) * np.ones(32)
    for block in range(10):
        alone = np.zeros_like(x)
        alone[:, 32 * block : 32 * block + 32] = x[:, 32 * block : 32 * block + 32]
        with running(level=level):
            got = np.asarray(NATIVE.product(jnp.asarray(alone), weight, None, None))
        size = largest[:, block] @ np.abs(matrix[:, 32 * block : 32 * block + 32]).T
        assert (np.abs(got - alone.astype(np.float64) @ matrix.T) <= 2.0**-22 * size + 2.0**-90).all()


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", [*DENSE_KINDS, *FEW_QUANT_KINDS])
@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_shows_in_its_token_alone(kind, level, tokens, number):
    weight = random_weight(16, kind, out_features=20, in_features=96)
    x = np.array(activations(17, tokens, 96))
    with running(level=level):
        before = np.asarray(NATIVE.product(jnp.asarray(x), weight, None, None))
        x[1, 40] = number
        after = np.asarray(NATIVE.product(jnp.asarray(x), weight, None, None))
    assert not np.isfinite(after[1]).any()
    others = np.arange(tokens) != 1
    np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_reference_rows_bit_for_bit(kind, level):
    weight = random_weight(7, kind, out_features=40, in_features=800)
    last = weight.out_features - 1
    ids = jnp.asarray([0, 39, 5, 5, -3, last + 2], jnp.int32)
    with running(level=level):
        got = np.asarray(NATIVE.embed(ids, weight))
    table = np.asarray(values_of(weight))
    np.testing.assert_allclose(got, table[[0, 39, 5, 5, 0, last]], rtol=2e-7, atol=1e-7)


@pytest.mark.usefixtures("fully_optimized")
def test_a_loop_over_a_stack_copies_no_weights():
    weight = random_weight(8, "q4_1", 6, out_features=64, in_features=64)

    def network(x, weight):
        return jax.lax.fori_loop(0, 6, lambda layer, x: x + NATIVE.product(x, weight, layer, None), x)

    compiled = jax.jit(network).lower(activations(9, 2, 64), weight).compile()
    moved = ("copy(", "copy-start(", "dynamic-slice(", " slice(", "fusion(")
    lines = [line for line in compiled.as_text().splitlines() if any(word in line for word in moved)]
    assert not [line for line in lines if "u8[" in line or "f16[" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < weight.nbytes / 6


@pytest.mark.usefixtures("fully_optimized")
def test_a_stack_stored_in_different_ways_is_multiplied_as_its_entries_are_and_not_copied():
    parts = tuple(random_weight(8, kind, 3, out_features=64, in_features=64) for kind in ("q6_k", "q4_k"))
    which, at = (jnp.asarray(numbers, jnp.int32) for numbers in ([0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 2, 2]))
    weight = MixedWeight(parts, which, at)
    x = activations(9, 2, 64)
    for layer in range(6):
        entry = take_layer(parts[which[layer]], at[layer])
        np.testing.assert_array_equal(
            NATIVE.product(x, weight, layer, None), NATIVE.product(x, entry, None, None), err_msg=str(layer)
        )

    def network(x, weight):
        return jax.lax.fori_loop(0, 6, lambda layer, x: x + NATIVE.product(x, weight, layer, None), x)

    compiled = jax.jit(network).lower(x, weight).compile()
    lines = [line for line in compiled.as_text().splitlines() if "copy(" in line or "dynamic-slice(" in line]
    assert not [line for line in lines if "u8[" in line or "f16[" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < weight.nbytes / 6


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda x, w: (x[0], w, 0), r"x has shape \[64\], wanted \[any, any\]"),
        (lambda x, w: (x[:, :32], w, 0), r"x has shape \[3, 32\], wanted \[any, 64\]"),
        (lambda x, w: (x.astype(jnp.int32), w, 0), r"x is int32, wanted float32, float16 or bfloat16"),
        (lambda x, w: (x, w, 2), r"layer 2 is outside 0 to 1"),
        (lambda x, w: (x, w, -1), r"layer -1 is outside 0 to 1"),
        (lambda x, w: (x, DenseWeight(w.values[0, 0]), None), r"weight has shape \[64\], wanted \[out, in\]"),
    ],
)
def test_a_bad_operand_is_an_error_with_the_numbers(break_it, message):
    weight = random_weight(10, "float32", 2, out_features=8, in_features=64)
    x, weight, layer = break_it(activations(11, 3, 64), weight)
    result = jax.ShapeDtypeStruct((3, 8), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_linear(x, jnp.asarray(layer or 0, jnp.int32), weight.values, results=[result])


def test_quants_without_their_scales_are_an_error():
    weight = random_weight(12, "q4_1", out_features=8, in_features=96)
    results = [jax.ShapeDtypeStruct((3, 8), jnp.float32)]
    x, layer = activations(13, 3, 96), jnp.zeros((), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="mins is missing, or is not an array: 2 parts are given"):
        call_linear(x, layer, weight.quants, weight.scales, results=results, kinds="q4_1")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scales has 1 x 8 x 2 numbers for quants of 1 x 8 x 96"):
        call_linear(x, layer, weight.quants, weight.scales[:, :2], weight.mins, results=results, kinds="q4_1")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda q, s, m: (q[:, :0], s[:, :0], m[:, :0]), "weight has 0 bytes in sixteen rows"),
        (lambda q, s, m: (q[:, :800], s, m), "weight has 800 bytes in sixteen rows, wanted a multiple of 256"),
        (lambda q, s, m: (q, s[:, :32], m), "scales has 1 x 2 x 32 numbers, wanted 1 x 2 x 64"),
        (lambda q, s, m: (q, s, m[:1]), "mins has 1 x 1 x 64 numbers, wanted 1 x 2 x 64"),
        (lambda q, s, m: (q, s.astype(jnp.float32), m), "scales is float32, wanted float16"),
        (lambda q, s, m: (q, s), "mins is missing, or is not an array: 2 parts are given"),
    ],
)
def test_tiles_of_a_wrong_size_are_an_error(break_it, message):
    weight = random_weight(12, "q4_1/tiles", out_features=32, in_features=128)
    parts = break_it(weight.quants, weight.scales, weight.mins)
    results = [jax.ShapeDtypeStruct((3, 32), jnp.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_linear(activations(13, 3, 128), jnp.zeros((), jnp.int32), *parts, results=results, kinds="q4_1_tiles")


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (jnp.int32(4), "4 tokens are to be multiplied of 3"),
        (jnp.int32(-1), "-1 tokens are to be multiplied of 3"),
        (jnp.zeros(1, jnp.int32), r"used has shape \[1\]"),
        (jnp.float32(1), "used is float32"),
    ],
)
def test_a_wrong_number_of_used_tokens_is_an_error_with_the_numbers(used, message):
    NATIVE.argmax(jnp.zeros((1, 1)))  # registers the handlers
    results = [jax.ShapeDtypeStruct((3, 5), jnp.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_linear(jnp.ones((3, 8)), jnp.int32(0), jnp.ones((5, 8)), results=results, used=used)
