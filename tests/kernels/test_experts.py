"""A mixture of experts equals the sum it stands for, computes chosen experts only, and no batch changes a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_kernels.dequantize import dequantize
from kv_kernels.experts import Experts, Routing, expert_mlp, route, tile_width
from kv_kernels.native import NativeProvider
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import BlockQuantWeight, DenseWeight

LAYERS, EXPERTS, HIDDEN, INNER = 2, 5, 32, 64
PROVIDERS = {"reference": ReferenceProvider(), "native": NativeProvider()}


def dense(rng: np.random.Generator, *shape: int) -> DenseWeight:
    return DenseWeight(jnp.asarray(rng.standard_normal(shape) * 0.2, jnp.float32))


def quantized(rng: np.random.Generator, *shape: int) -> BlockQuantWeight:
    scales = rng.uniform(0.001, 0.003, (*shape[:-1], shape[-1] // 32)).astype(np.float16)
    return BlockQuantWeight(rng.integers(-127, 128, shape, np.int8), scales, None, "q8_0")


def mixture(make, seed: int = 0) -> Experts:
    rng = np.random.default_rng(seed)
    wide = (LAYERS, EXPERTS, INNER, HIDDEN)
    return Experts(make(rng, *wide), make(rng, *wide), make(rng, LAYERS, EXPERTS, HIDDEN, INNER), "silu")


def tokens(count: int, k: int, seed: int = 1) -> tuple[jax.Array, Routing]:
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((count, HIDDEN)), jnp.float32)
    return x, route(jnp.asarray(rng.standard_normal((count, EXPERTS)), jnp.float32), k, renormalize=True)


def naive(x: jax.Array, routing: Routing, experts: Experts, layer: int) -> np.ndarray:
    gate, up, down = (np.asarray(dequantize(each, "float32"), np.float64)[layer] for each in experts[:3])
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(routing.chosen[token], routing.weights[token], strict=True):
            wide = gate[expert] @ row
            out[token] += float(weight) * (down[expert] @ (wide / (1 + np.exp(-wide)) * (up[expert] @ row)))
    return out


def compute(provider: str, x: jax.Array, routing: Routing, experts: Experts, layer: int) -> np.ndarray:
    run = jax.jit(lambda *operands: expert_mlp(PROVIDERS[provider], *operands[:2], experts, operands[2]))
    return np.asarray(run(x, routing, jnp.int32(layer)))


@pytest.mark.parametrize("make", [dense, quantized])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("count", "k"), [(1, 2), (19, 3)])
def test_it_equals_the_weighted_sum_of_each_token_s_experts(provider: str, make, count: int, k: int) -> None:
    experts = mixture(make)
    x, routing = tokens(count, k)
    np.testing.assert_allclose(
        compute(provider, x, routing, experts, 1), naive(x, routing, experts, 1), rtol=1e-4, atol=1e-4
    )


def test_all_tokens_may_choose_one_expert() -> None:
    experts, (x, _) = mixture(dense), tokens(70, 1)
    routing = Routing(jnp.full((70, 1), 3), jnp.ones((70, 1)))
    np.testing.assert_allclose(
        compute("native", x, routing, experts, 0), naive(x, routing, experts, 0), rtol=1e-4, atol=1e-4
    )


def test_an_expert_that_nobody_chose_is_not_computed() -> None:
    experts, (x, routing) = mixture(dense), tokens(9, 2)
    routing = routing._replace(chosen=routing.chosen % 3)
    poisoned = experts._replace(down=DenseWeight(experts.down.values.at[:, 3:].set(jnp.nan)))
    got, wanted = (compute("native", x, routing, each, 0) for each in (poisoned, experts))
    np.testing.assert_array_equal(got, wanted)


def test_a_token_has_the_same_bits_alone_and_in_any_batch() -> None:
    experts, (x, routing) = mixture(dense), tokens(33, 2)
    whole = compute("native", x, routing, experts, 1)
    for token in (0, 17, 32):
        its = Routing(*(part[token : token + 1] for part in routing))
        alone = compute("native", x[token : token + 1], its, experts, 1)
        np.testing.assert_array_equal(alone[0], whole[token])


def test_weights_are_of_all_experts_or_of_the_chosen() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.2, 0.2]]))
    over_all, renormalized = (route(logits, 2, renormalize=choice) for choice in (False, True))
    assert over_all.chosen.tolist() == [[1, 2]]
    np.testing.assert_allclose(over_all.weights, [[0.5, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(renormalized.weights, [[5 / 7, 2 / 7]], rtol=1e-6)


def test_tiles_hold_what_an_expert_has_on_average() -> None:
    assert [tile_width(pairs, 8) for pairs in (1, 8, 9, 40, 10_000)] == [1, 1, 2, 8, 32]
