"""The network as a function: pure, weights as arguments, the same in a loop and unrolled."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_step import DenseModel, DenseStep, logits_of

from kv_kernels.weights import DenseWeight
from models import LoadedModel, load_model
from models.assembly import by_path, parameter_shapes
from models.config import DecoderConfig
from models.decoder import Decoder, Linear


@pytest.fixture(scope="module")
def tiny(golden: Path) -> LoadedModel:
    return load_model(golden / "llama_bias_tied")


def test_a_loop_over_layers_equals_the_unrolled_layers(tiny: LoadedModel) -> None:
    ids = np.arange(3, 11)
    looped, unrolled = DenseModel(tiny, 8).logits(ids), DenseModel(tiny, 8, unrolled=True).logits(ids)
    np.testing.assert_allclose(looped, unrolled, atol=1e-4)


def test_layers_with_experts_are_the_same_unrolled(golden: Path) -> None:
    model, ids = load_model(golden / "mixtral"), np.arange(3, 11)
    looped, unrolled = DenseModel(model, 8).logits(ids), DenseModel(model, 8, unrolled=True).logits(ids)
    np.testing.assert_allclose(looped, unrolled, atol=1e-4)


def test_no_weight_is_a_constant_of_the_traced_program(tiny: LoadedModel) -> None:
    step, ids = DenseStep(jnp.arange(8)), jnp.arange(8)
    traced = jax.make_jaxpr(logits_of(tiny))(tiny.params, ids, step, ids)
    assert max((np.size(constant) for constant in traced.consts), default=0) <= tiny.spec.head_dim
    assert len(traced.jaxpr.invars) == len(jax.tree.leaves(tiny.params)) + 3


def test_only_the_rows_asked_for_meet_the_vocabulary(tiny: LoadedModel) -> None:
    step, ids = DenseStep(jnp.arange(8)), jnp.arange(3, 11)
    some = jax.jit(logits_of(tiny))(tiny.params, ids, step, jnp.array([7, 2]))
    assert some.shape == (2, tiny.spec.vocab_size)
    assert some.dtype == jnp.float32
    np.testing.assert_allclose(some, DenseModel(tiny, 8).logits(np.arange(3, 11))[[7, 2]], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32_and_gives_float32_logits(
    golden: Path, dtype: str, tiny: LoadedModel
) -> None:
    half = load_model(golden / "llama_bias_tied", dtype=dtype)
    ids = np.arange(3, 11)
    logits, exact = DenseModel(half, 8).logits(ids), DenseModel(tiny, 8).logits(ids)
    assert logits.dtype == np.float32
    assert half.params["layers"]["attention"]["q"]["weight"].values.dtype == jnp.dtype(dtype)
    assert half.params["norm"]["weight"].dtype == jnp.float32
    assert 1e-5 < np.abs(logits - exact).max() < {"bfloat16": 1.0, "float16": 0.1}[dtype]


@pytest.mark.parametrize("case", ["gemma3", "granite", "mixtral", "olmo2"])
def test_every_part_keeps_half_precision_between_float32_sums(golden: Path, case: str) -> None:
    half, whole = (load_model(golden / case, dtype=dtype) for dtype in ("bfloat16", "float32"))
    ids, step = np.arange(3, 7), DenseStep(jnp.arange(4))
    logits, exact = DenseModel(half, 4).logits(ids), DenseModel(whole, 4).logits(ids)
    assert logits.dtype == np.float32
    # The median: where two experts are close, rounding may choose the other for a token.
    assert 1e-4 < np.median(np.abs(logits - exact)) < 0.1 * np.median(np.abs(exact))
    with jax.numpy_dtype_promotion("strict"):  # two widths that meet are an error
        jax.eval_shape(logits_of(half), half.params, jnp.arange(4), step, jnp.array([3]))


def test_the_embedding_s_multiplier_is_rounded_to_the_compute_dtype(golden: Path) -> None:
    seen: list[jax.Array] = []

    class Stopped(Exception):
        pass

    class FirstStep(DenseStep):
        def linears(self, x, matrices, layer, *, norm=None):
            seen.append(x)
            raise Stopped

    model = load_model(golden / "gemma2", dtype="bfloat16")
    with pytest.raises(Stopped):
        model.forward(model.params, jnp.arange(4), FirstStep(jnp.arange(4), unrolled=True), jnp.array([3]))
    embedding = model.params["embedding"]["weight"].values[:4]
    assert model.decoder.config.embedding_multiplier == 48**0.5
    np.testing.assert_array_equal(seen[0], embedding * jnp.asarray(6.9375, jnp.bfloat16))  # not of 6.9282


@pytest.mark.parametrize("case", ["llama", "llama_bias_tied"])
def test_the_vocabulary_product_takes_half_precision_and_gives_float32(
    golden: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, product = [], DenseStep.product

    def recorded(self, x, weight, layer, out_dtype):
        products.append((weight.out_features, x.dtype, out_dtype))
        return product(self, x, weight, layer, out_dtype)

    monkeypatch.setattr(DenseStep, "product", recorded)
    half = load_model(golden / case, dtype="bfloat16")
    jax.eval_shape(logits_of(half), half.params, jnp.arange(8), DenseStep(jnp.arange(8)), jnp.array([7]))
    assert {x for _, x, _ in products} == {jnp.dtype("bfloat16")}  # a wider x would widen the matrix it meets
    assert [out for size, _, out in products if size == half.spec.vocab_size] == [jnp.float32]


def test_a_product_and_its_bias_are_rounded_once() -> None:
    module = Linear(2, 1, split="whole", bias=True)
    module.weight = DenseWeight(jnp.array([[1, 2**-9]], jnp.bfloat16))
    module.bias = jnp.array([2**-9 + 2**-12], jnp.float32)
    y = DenseStep(jnp.arange(1)).linear(jnp.ones((1, 2), jnp.bfloat16), module.matrix)
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0]) == 1 + 2**-7  # rounding the product first would lose its 2**-9, and then the bias


def test_the_description_of_the_parameters_is_what_is_loaded(tiny: LoadedModel) -> None:
    shapes = {path: each.shape for path, each in parameter_shapes(tiny.decoder).items()}
    loaded = {path: getattr(leaf, "values", leaf).shape for path, leaf in by_path(tiny.params).items()}
    assert shapes == loaded
    assert shapes["layers.attention.k.bias"] == (2, 32)
    assert "output.weight" not in shapes


def test_a_decoder_is_described_without_allocating_its_weights() -> None:
    config = DecoderConfig("llama", 10**6, 10**5, 10**6, 10**3, 100, 10, 1000, 10**6, 1e-5)
    shapes = parameter_shapes(Decoder(config, "bfloat16"))
    assert shapes["layers.mlp.up.weight"].shape == (10**3, 10**6, 10**5)
