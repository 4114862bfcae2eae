"""The token of the largest logit, found without the logits: it is that of the logits, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_case import AVAILABLE_LEVELS, DENSE_KINDS, QUANT_KINDS, random_weight, running

from kv_kernels.native import NativeProvider
from kv_kernels.provider import Affine, Norm
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import DenseWeight

NATIVE, REFERENCE = NativeProvider(), ReferenceProvider()
KINDS = (*DENSE_KINDS, *QUANT_KINDS)
LARGEST = float(np.finfo(np.float32).max)


def norm_of(features: int) -> Norm:
    return Norm(jnp.asarray(np.random.default_rng(features).uniform(0.5, 1.5, features), jnp.float32), 1e-5)


def assert_is_that_of_the_logits(x: jax.Array, matrix: Affine) -> np.ndarray:
    """And returns it; to be called with a level in use."""
    norm = norm_of(x.shape[1])
    (logits,) = NATIVE.linear(x, (matrix,), None, norm=norm, out_dtype=jnp.float32)
    token = NATIVE.most_likely(x, matrix, norm=norm)
    assert (token.shape, token.dtype) == ((len(x),), jnp.int32)
    np.testing.assert_array_equal(token, REFERENCE.argmax(logits))
    return np.asarray(token)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    level=st.sampled_from(AVAILABLE_LEVELS),
    rows=st.integers(0, 33),
    vocab=st.sampled_from([1, 17, 150, 1000]),
    features=st.integers(1, 100),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_that_of_the_logits_of_every_kind_and_size(kind, level, rows, vocab, features, dtype, has_bias, seed):
    weight = random_weight(seed, kind, out_features=vocab, in_features=features)
    bias = jnp.asarray(normal(seed, weight.out_features)) if has_bias else None
    x = jnp.asarray(normal(seed, rows, weight.in_features), dtype)
    with running(level=level):
        assert_is_that_of_the_logits(x, Affine(weight, bias))


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_equals_it_is_the_first_wherever_tasks_begin(level, threads, dtype):
    vocab, largest = 5000, np.arange(1, 5000, 8)
    values = np.full((vocab, 32), -1, np.float32)
    x = jnp.ones((33, 32), dtype)
    with running(level=level, threads=threads):
        for first in (1, 57, 1017, 1025, 2041, 4993):
            values[:] = -1
            values[largest[largest >= first]] = 1  # equals, in every block of outputs from there on
            token = assert_is_that_of_the_logits(x, Affine(DenseWeight(jnp.asarray(values))))
            assert token.tolist() == [first] * 33


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
def test_where_nothing_is_above_minus_infinity_there_is_none(level):
    matrix = Affine(DenseWeight(jnp.ones((3000, 32))), jnp.full(3000, -jnp.inf))
    with running(level=level):
        assert assert_is_that_of_the_logits(jnp.ones((2, 32)), matrix).tolist() == [-1, -1]


@pytest.mark.parametrize("level", AVAILABLE_LEVELS)
@pytest.mark.parametrize("shares", [(0.5, 0.4, 0.1, 0, 0), (0.9, 0.09, 0, 0.005, 0.005), (0, 0.5, 0.5, 0, 0)])
def test_nan_and_infinities_are_taken_as_they_are_in_logits(level, shares):
    weight = DenseWeight(jnp.asarray(normal(0, 2100, 32)))
    rows = normal(1, 8, 32)
    rows[5:, 3] = np.nan, np.inf, -np.inf
    with running(level=level):
        for seed in range(4):
            bias = np.random.default_rng(seed).choice([0.0, np.nan, -np.inf, np.inf, LARGEST], 2100, p=shares)
            assert_is_that_of_the_logits(jnp.asarray(rows), Affine(weight, jnp.asarray(bias, jnp.float32)))


def test_more_rows_than_a_block_of_tokens_are_all_answered():
    weight = DenseWeight(jnp.asarray(normal(0, 70, 32), jnp.bfloat16))
    for dtype in ("float32", "bfloat16"):
        assert_is_that_of_the_logits(jnp.asarray(normal(1, 600, 32), dtype), Affine(weight))


def call(x, layer, *parts, rows=3, used=3, **attributes) -> None:
    """The handler itself, so that operands can be wrong."""
    result = jax.ShapeDtypeStruct((rows,), jnp.int32)
    operands = x, layer, jnp.int32(used), *parts
    defaults = {"kind": "dense", "norm_eps": np.float32(-1), "int8_x": False}
    jax.block_until_ready(jax.ffi.ffi_call("jaxkv_most_likely", result)(*operands, **defaults | attributes))


@pytest.mark.parametrize(
    ("operands", "settings", "message"),
    [
        ((jnp.ones((3, 8)), 0, jnp.ones((5, 9))), {}, r"x has shape \[3, 8\], wanted \[any, 9\]"),
        ((jnp.ones((3, 8)), 0, jnp.ones((5, 8))), {"rows": 2}, r"result has shape \[2\], wanted \[3\]"),
        ((jnp.ones((3, 8), int), 0, jnp.ones((5, 8))), {}, "x is int32, wanted float32, float16 or bfloat16"),
        ((jnp.ones((3, 8)), 0, jnp.ones((0, 8))), {}, "weight has no outputs"),
        ((jnp.ones((3, 8)), 0, jnp.ones((5, 8))), {"kind": "dense+bias"}, "bias is missing"),
        ((jnp.ones((3, 8)), 0, jnp.ones((5, 8)), jnp.ones(4)), {"kind": "dense+bias"}, "wanted 5 numbers a layer"),
        ((jnp.ones((3, 8)), 0, jnp.ones(7), jnp.ones((5, 8))), {"norm_eps": np.float32(0)}, "wanted 8 numbers"),
        ((jnp.ones((3, 8)), 0, jnp.ones((5, 8)), jnp.ones(5)), {}, "2 parts are given, 1 are called for"),
        ((jnp.ones((3, 8)), 0, jnp.ones((5, 8))), {"kind": "q9_9"}, "weight kind q9_9 is not one"),
        ((jnp.ones((3, 8)), 0), {}, "weight is missing"),
        ((jnp.ones((3, 8)), 0, jnp.ones((5, 8))), {"used": 4}, "4 tokens are to be multiplied of 3"),
    ],
)
def test_wrong_operands_are_an_error_with_the_numbers(operands, settings, message):
    x, layer, *parts = operands
    NATIVE.argmax(jnp.zeros((1, 1)))  # registers the handlers
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(x, jnp.int32(layer), *parts, **settings)
