"""The Triton kernel of a mixture's experts: interpreted, against the definition, and lowered for the GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_case import random_weight

from kv_kernels.aiter import AiterProvider
from kv_kernels.experts import tile_pairs, tile_width
from kv_kernels.flashinfer import FlashInferProvider
from kv_kernels.pallas import PallasProvider
from kv_kernels.pallas.grouped import can_group
from kv_kernels.provider import KernelNeeds, Tiles
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import BlockQuantWeight, DenseWeight, MixedWeight, Weight

LAYERS, EXPERTS, K = 2, 5, 2
NEEDS = KernelNeeds("cuda", "bfloat16", num_heads=32, num_kv_heads=8, head_dim=128, tokens_per_page=16)
GPU_PROVIDERS = {
    "pallas": (PallasProvider(), "cuda"),
    "pallas on rocm": (PallasProvider(), "rocm"),
    "flashinfer": (FlashInferProvider(NEEDS), "cuda"),
    "aiter": (AiterProvider(), "rocm"),
}
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Of the largest value: products of a half-precision model are rounded to its dtype before the second one."""


def stacks(kind: str, hidden: int, inner: int) -> tuple[Weight, Weight, Weight]:
    """gate, up [entries, inner, hidden] and down [entries, hidden, inner], of numbers that leave x its size."""

    def weight(seed: int, out_features: int, in_features: int) -> Weight:
        made = random_weight(seed, kind, LAYERS * EXPERTS, out_features=out_features, in_features=in_features)
        if isinstance(made, DenseWeight):
            return DenseWeight(made.values * jnp.asarray(in_features**-0.5, made.values.dtype))
        return made

    return weight(1, inner, hidden), weight(2, inner, hidden), weight(3, hidden, inner)


def batch(tokens: int, hidden: int, dtype: str = "float32", experts: int = EXPERTS) -> tuple[jax.Array, Tiles]:
    """Rows, and what they chose of the last layer's first `experts` experts."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), dtype)
    chosen = np.stack([rng.permutation(experts)[:K] for _ in range(tokens)])
    tiles = tile_pairs(jnp.asarray(chosen), EXPERTS)
    return x, tiles._replace(entry=tiles.entry + (LAYERS - 1) * EXPERTS)


@functools.partial(jax.jit, static_argnums=3, compiler_options={"xla_backend_optimization_level": 0})
def compute(x: jax.Array, weights: tuple[Weight, Weight, Weight], tiles: Tiles, activation: str) -> jax.Array:
    return PallasProvider(interpret=True).grouped_mlp(x, *weights, tiles, K, activation=activation)


def check(x: jax.Array, weights: tuple[Weight, Weight, Weight], tiles: Tiles, activation: str = "silu") -> None:
    got = np.asarray(compute(x, weights, tiles, activation))
    wanted = np.asarray(ReferenceProvider().grouped_mlp(x, *weights, tiles, K, activation=activation))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, rtol=0, atol=BOUNDS[str(x.dtype)] * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("float32", "bfloat16")]
)
def test_dense_experts_of_odd_sizes_equal_the_definition(dtype, kind):
    x, tiles = batch(9, 48, dtype)
    check(x, stacks(kind, 48, 40), tiles, "gelu_tanh")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *(("float32", kind) for kind in ("q8_0", "q4_0", "q4_1", "q5_0", "q6_k", "q5_k/groups")),
        *(("float32", kind) for kind in ("q8_0/groups", "q4_1/groups")),
        ("bfloat16", "q4_0"),
    ],
)
def test_quantized_experts_equal_the_definition(dtype, kind):
    x, tiles = batch(9, 64, dtype)
    weights = stacks(kind, 64, 96)
    assert all(map(can_group, weights))
    check(x, weights, tiles)


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (4, 2), (9, 4), (35, 16), (81, 32)])
def test_tiles_of_any_width_equal_the_definition(tokens, width):
    assert tile_width(tokens * K, EXPERTS) == width
    x, tiles = batch(tokens, 200)
    check(x, stacks("float32", 200, 72), tiles)


def test_a_pair_has_the_same_bits_alone_and_in_any_batch():
    weights = stacks("float32", 200, 72)
    x, tiles = batch(81, 200)
    whole = compute(x, weights, tiles, "silu").reshape(81, K, 200)
    chosen = np.zeros((81, K), np.int32)
    for entry, row in zip(tiles.entry[: tiles.used].tolist(), tiles.pair[: tiles.used].tolist(), strict=True):
        for pair in row:
            if pair < 81 * K:
                chosen[pair // K, pair % K] = entry
    for some in ([0], [80, 3], [*range(40, 60)]):
        its = tile_pairs(jnp.asarray(chosen[some]), LAYERS * EXPERTS)
        alone = compute(x[jnp.asarray(some)], weights, its, "silu").reshape(len(some), K, 200)
        np.testing.assert_array_equal(alone, whole[jnp.asarray(some)])


def test_nothing_that_no_pair_chose_is_read_even_as_nan():
    weights = stacks("float32", 48, 40)
    x, tiles = batch(9, 48, experts=3)
    chosen = np.isin(np.arange(LAYERS * EXPERTS), tiles.entry[: tiles.used])
    assert chosen.sum() == 3
    poisoned = tuple(DenseWeight(jnp.where(chosen[:, None, None], weight.values, jnp.nan)) for weight in weights)
    padded = tiles._replace(entry=jnp.where(jnp.arange(len(tiles.entry)) < tiles.used, tiles.entry, 0))
    np.testing.assert_array_equal(*(compute(x, each, padded, "silu") for each in (weights, poisoned)))


def test_tiles_of_padding_are_not_computed():
    weights = stacks("float32", 48, 40)
    x, tiles = batch(9, 48)
    fewer = tiles._replace(used=tiles.used - 1)
    got, whole = (compute(x, weights, each, "silu") for each in (fewer, tiles))
    last = tiles.pair[tiles.used - 1]  # padding has no pairs; had it some, nothing were computed for them
    np.testing.assert_array_equal(got, whole.at[last].set(0, mode="drop"))


def test_products_of_float32_are_not_cut_to_tf32():
    x, tiles = batch(9, 48)
    weights = stacks("float32", 48, 40)
    jaxpr = str(jax.make_jaxpr(lambda: PallasProvider().grouped_mlp(x, *weights, tiles, K, activation="silu"))())
    assert jaxpr.count("dot_general[") == jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 3


def lowered(name: str, x, weights, tiles) -> str:
    provider, platform = GPU_PROVIDERS[name]
    run = jax.jit(lambda *operands: provider.grouped_mlp(operands[0], *operands[1], operands[2], K, activation="silu"))
    return run.trace(x, weights, tiles).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4_k"])
@pytest.mark.parametrize("name", GPU_PROVIDERS)
def test_it_lowers_for_the_gpus_as_two_kernels_and_no_loop(name, kind):
    x, tiles = batch(9, 64, "bfloat16")
    text = lowered(name, x, stacks(kind, 64, 96), tiles)
    assert text.count("@__gpu$xla.gpu.triton") == text.count('name = "jaxkv_grouped_product"') == 2
    assert not any(operation in text for operation in ("stablehlo.while", "stablehlo.dot", "dynamic_slice"))


def mixed(weight: DenseWeight) -> MixedWeight:
    count = LAYERS * EXPERTS
    parts = (weight, DenseWeight(weight.values.astype("bfloat16")))
    return MixedWeight(parts, jnp.arange(count, dtype=jnp.int32) % 2, jnp.arange(count, dtype=jnp.int32))


@pytest.mark.parametrize("way", ["f8_e4m3", "mixed"])
def test_what_the_kernel_does_not_read_goes_tile_by_tile(way):
    x, tiles = batch(9, 64)
    weights = stacks("float32" if way == "mixed" else way, 64, 96)
    weights = (*weights[:2], mixed(weights[2])) if way == "mixed" else weights
    check(x, weights, tiles)
    text = lowered("pallas", x, weights, tiles)
    assert "triton" not in text
    assert "stablehlo.while" in text


@pytest.mark.parametrize(("entries", "readable"), [(1 << 10, True), ((1 << 10) + 1, False), ((1 << 11) + 1, True)])
def test_stacks_that_would_pass_the_offsets_of_32_bits_are_not_taken(entries, readable):
    quants = jax.ShapeDtypeStruct((entries, 1 << 10, 1 << 11), jnp.int8)
    scales = jax.ShapeDtypeStruct((entries, 1 << 10, 1 << 6), jnp.float16)
    assert can_group(BlockQuantWeight(quants, scales, None, "q8_0")) is readable
    halves = jax.ShapeDtypeStruct((entries, 1 << 10, 1 << 11), jnp.bfloat16)
    assert can_group(DenseWeight(halves))
