"""A mixture of experts equals the sum it stands for, computes chosen experts only, and no batch changes a token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_kernels.dequantize import dequantize
from kv_kernels.experts import NO_EXPERT, Experts, Routing, expert_mlp, route, tile_pairs, tile_width
from kv_kernels.native import NativeProvider
from kv_kernels.pallas import PallasProvider
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import BlockQuantWeight, DenseWeight

LAYERS, EXPERTS, HIDDEN, INNER = 2, 5, 32, 64
PROVIDERS = {"reference": ReferenceProvider(), "native": NativeProvider(), "pallas": PallasProvider(interpret=True)}


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


def compute(
    provider: str, x: jax.Array, routing: Routing, experts: Experts, layer: int, first_expert: int = 0
) -> np.ndarray:
    # Interpreted kernels are long programs and short runs.
    options = {"xla_backend_optimization_level": 0} if provider == "pallas" else None

    @functools.partial(jax.jit, compiler_options=options)
    def run(x: jax.Array, routing: Routing, experts: Experts, layer: jax.Array) -> jax.Array:
        return expert_mlp(
            PROVIDERS[provider], x, routing, experts._replace(activation="silu"), layer, first_expert=first_expert
        )

    return np.asarray(run(x, routing, experts._replace(activation=None), jnp.int32(layer)))


def part(routing: Routing, of: slice) -> Routing:
    return Routing(*(each[of] for each in routing))


def some_of(experts: Experts, of: slice) -> dict[str, DenseWeight]:
    return {name: DenseWeight(getattr(experts, name).values[:, of]) for name in ("gate", "up", "down")}


@pytest.mark.parametrize("make", [dense, quantized])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("count", "k"), [(1, 2), (19, 3)])
def test_it_equals_the_weighted_sum_of_each_token_s_experts(provider: str, make, count: int, k: int) -> None:
    experts = mixture(make)
    x, routing = tokens(count, k)
    np.testing.assert_allclose(
        compute(provider, x, routing, experts, 1), naive(x, routing, experts, 1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_all_tokens_may_choose_one_expert(provider: str) -> None:
    experts, (x, _) = mixture(dense), tokens(70, 1)
    routing = Routing(jnp.full((70, 1), 3), jnp.ones((70, 1)))
    np.testing.assert_allclose(
        compute(provider, x, routing, experts, 0), naive(x, routing, experts, 0), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_expert_that_nobody_chose_is_not_computed(provider: str) -> None:
    experts, (x, routing) = mixture(dense), tokens(9, 2)
    routing = routing._replace(chosen=routing.chosen % 3)
    poisoned = experts._replace(down=DenseWeight(experts.down.values.at[:, 3:].set(jnp.nan)))
    got, wanted = (compute(provider, x, routing, each, 0) for each in (poisoned, experts))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nothing_is_computed_for_a_token_that_chose_nobody(provider: str) -> None:
    (x, routing), experts = tokens(7, 2), mixture(dense)
    nobody = routing._replace(chosen=routing.chosen.at[4:].set(NO_EXPERT))
    assert set(np.asarray(tile_pairs(nobody.chosen, EXPERTS).pair).flat) == {*range(8), 14}  # 14 is none
    got = compute(provider, x.at[4:].set(np.nan), nobody, experts, 1)
    np.testing.assert_allclose(got[:4], naive(x[:4], part(routing, slice(4)), experts, 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[4:], 0)


@pytest.mark.parametrize("provider", ["native", "pallas"])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(provider: str) -> None:
    experts, (x, routing) = mixture(dense), tokens(65, 2)
    assert [tile_width(pairs, EXPERTS) for pairs in (2, 34, 130)] == [1, 8, 32]
    whole, half = (compute(provider, x[:count], part(routing, slice(count)), experts, 1) for count in (65, 17))
    np.testing.assert_array_equal(half, whole[:17])
    for token in (0, 64):
        only = slice(token, token + 1)
        np.testing.assert_array_equal(compute(provider, x[only], part(routing, only), experts, 1), whole[only])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_devices_with_some_of_the_experts_add_up_to_all(provider: str) -> None:
    experts, (x, routing) = mixture(dense), tokens(11, 2)
    shares = [
        compute(provider, x, routing, experts._replace(**some_of(experts, of)), 1, of.start)
        for of in (slice(0, 2), slice(2, EXPERTS))
    ]
    np.testing.assert_allclose(sum(shares), compute(provider, x, routing, experts, 1), rtol=1e-5, atol=1e-6)
    none_of_mine = ~np.asarray((routing.chosen < 2).any(1))
    assert none_of_mine.any()
    assert not shares[0][none_of_mine].any()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_device_of_one_expert_that_nobody_chose_adds_nothing(provider: str) -> None:
    experts, (x, routing) = mixture(dense), tokens(1, 2)
    lone = experts._replace(**some_of(experts, slice(0, 1)))
    elsewhere = routing._replace(chosen=jnp.asarray([[2, 4]]))
    assert not compute(provider, x, elsewhere, lone, LAYERS - 1).any()


def test_weights_are_of_all_experts_or_of_the_chosen() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.2, 0.2]]))
    over_all, renormalized = (route(logits, 2, renormalize=choice) for choice in (False, True))
    assert over_all.chosen.tolist() == [[1, 2]]
    np.testing.assert_allclose(over_all.weights, [[0.5, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(renormalized.weights, [[5 / 7, 2 / 7]], rtol=1e-6)


def test_tiles_hold_what_an_expert_has_on_average() -> None:
    assert [tile_width(pairs, 8) for pairs in (1, 8, 9, 40, 10_000)] == [1, 1, 2, 8, 32]


@pytest.mark.parametrize(
    ("counts", "num_experts"), [((1, 1, 1, 7), 4), ((10, 0, 0, 0), 4), ((0, 1, 1, 0), 4), ((1,) * 3, 9), ((33, 1), 2)]
)
def test_pairs_are_dealt_to_tiles_of_one_expert_in_their_order(counts: tuple[int, ...], num_experts: int) -> None:
    chosen = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    tiles = jax.jit(tile_pairs, static_argnums=1)(jnp.asarray(chosen)[:, None], num_experts)
    used, pairs = int(tiles.used), sum(counts)
    dealt: dict[int, list[int]] = {}
    for entry, row in zip(tiles.entry[:used].tolist(), tiles.pair[:used].tolist(), strict=True):
        dealt.setdefault(entry, []).extend(pair for pair in row if pair < pairs)
    wanted = {expert: np.flatnonzero(chosen == expert).tolist() for expert in np.unique(chosen).tolist()}
    assert dealt == wanted
    assert (np.asarray(tiles.pair[used:]) == pairs).all()


@pytest.mark.parametrize("counts", [(1, 1, 1, 7), (1, 1, 1, 1), (1, 1, 1, 37), (1, 0, 1, 0), (97, 1, 1, 1)])
def test_there_is_room_for_the_most_tiles_that_a_choice_can_need_and_no_more(counts: tuple[int, ...]) -> None:
    tiles = jax.jit(tile_pairs, static_argnums=1)(jnp.asarray(np.repeat(np.arange(4), counts))[:, None], 4)
    assert tiles.used == tiles.pair.shape[0]
