"""A quantized weight's value is what the gguf package says it is, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from kv_kernels.dequantize import dequantize
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import BlockQuantWeight, DenseWeight, take_layer, take_rows

KINDS = ["q8_0", "q4_0", "q4_1"]


def random_weight(kind: str, stack: tuple[int, ...] = (), out: int = 6, in_features: int = 96) -> BlockQuantWeight:
    rng = np.random.default_rng(7)
    rows = (*stack, out)
    scales = rng.standard_normal((*rows, in_features // 32)).astype(np.float16)
    if kind == "q8_0":
        return BlockQuantWeight(rng.integers(-128, 128, (*rows, in_features), dtype=np.int8), scales, None, kind)
    packed = rng.integers(0, 256, (*rows, in_features // 2), dtype=np.uint8)
    mins = rng.standard_normal(scales.shape).astype(np.float16) if kind == "q4_1" else None
    return BlockQuantWeight(packed, scales, mins, kind)


def gguf_values(weight: BlockQuantWeight) -> np.ndarray:
    """The weight packed into GGUF's bytes, read back by the gguf package."""
    quants_per_block = weight.quants.shape[-1] // weight.scales.shape[-1]
    parts = [weight.scales[..., None].view(np.uint8)]
    if weight.mins is not None:
        parts.append(weight.mins[..., None].view(np.uint8))
    blocks = weight.quants.reshape(*weight.scales.shape, quants_per_block)
    raw = np.concatenate([*parts, blocks.view(np.uint8)], axis=-1)
    raw = raw.reshape(*weight.scales.shape[:-1], -1)
    return quants.dequantize(raw, GGMLQuantizationType[weight.kind.upper()])


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jitted", [False, True])
def test_dequantize_equals_the_gguf_package_bit_for_bit(kind: str, jitted: bool) -> None:
    weight = random_weight(kind)
    function = jax.jit(dequantize, static_argnums=1) if jitted else dequantize
    got = np.asarray(function(weight, jnp.float32))
    np.testing.assert_array_equal(got.view(np.uint32), gguf_values(weight).view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_dequantizes_layer_by_layer(kind: str) -> None:
    weight = random_weight(kind, stack=(3,))
    assert (weight.stack, weight.out_features, weight.in_features) == ((3,), 6, 96)
    whole = np.asarray(dequantize(weight, jnp.float32))
    for layer in range(3):
        one = jax.jit(lambda w, i: dequantize(take_layer(w, i), jnp.float32))(weight, layer)
        np.testing.assert_array_equal(np.asarray(one), whole[layer])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_gathered_without_dequantizing_the_rest(kind: str) -> None:
    weight = random_weight(kind)
    rows = take_rows(weight, np.array([4, 0, 4]))
    assert rows.scales.dtype == jnp.float16
    assert rows.quants.dtype == weight.quants.dtype
    np.testing.assert_array_equal(dequantize(rows, jnp.float32), np.asarray(dequantize(weight, jnp.float32))[[4, 0, 4]])


@pytest.mark.parametrize(("kind", "bits"), [("q8_0", 8.5), ("q4_0", 4.5), ("q4_1", 5.0)])
def test_bytes_are_what_the_format_costs(kind: str, bits: float) -> None:
    assert random_weight(kind, stack=(2,)).nbytes == 2 * 6 * 96 * bits / 8


def test_a_dense_weight_is_cast_and_indexed() -> None:
    weight = DenseWeight(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    assert (weight.stack, weight.out_features, weight.in_features, weight.nbytes) == ((2,), 3, 4, 96)
    assert dequantize(weight, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(take_layer(weight, 1).values, weight.values[1])


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loop_over_layers_of_half_width_copies_no_stack(dtype: str) -> None:
    layers = 24
    weight = DenseWeight((jax.random.normal(jax.random.key(0), (layers, 64, 64)) / 8).astype(dtype))
    x = jnp.ones((1, 64))

    def every_layer(x: jax.Array, weight: DenseWeight) -> jax.Array:
        return jax.lax.fori_loop(
            0, layers, lambda layer, x: jnp.tanh(ReferenceProvider().product(x, weight, layer, None)), x
        )

    loop = jax.jit(every_layer).lower(x, weight).compile()
    for layer in range(layers):
        values = np.asarray(weight.values[layer]).astype(np.float32)
        x = np.tanh(x @ values.T)
    np.testing.assert_allclose(loop(jnp.ones((1, 64)), weight), x, rtol=1e-4, atol=1e-4)
    assert loop.memory_analysis().temp_size_in_bytes < weight.nbytes / 4


def test_weights_pass_through_jit_with_their_kind() -> None:
    weight = random_weight("q4_1")
    same = jax.jit(lambda w: w)(weight)
    assert isinstance(same, BlockQuantWeight)
    assert same.kind == "q4_1"
    assert len(jax.tree.leaves(weight)) == 3
