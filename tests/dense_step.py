"""A step without a cache: plain causal attention over the tokens of one sequence, plain products. For tests only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.composition import ComposedKernels, normalize, rotate
from kv_kernels.dequantize import dequantize
from kv_kernels.experts import expert_mlp
from kv_kernels.output_products import OutputProducts
from kv_kernels.provider import Scoring
from kv_kernels.weights import Weight, take_layer, take_rows
from models import LoadedModel


class DenseAttended(NamedTuple):
    values: jax.Array
    step: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["positions"], meta_fields=["unrolled"])
class DenseStep:
    """Every token sees itself and those before it; nothing is kept. `unrolled` is a Python loop over layers."""

    def __init__(self, positions: jax.Array, unrolled: bool = False) -> None:
        self.positions = positions
        self.unrolled = unrolled

    def attend(self, q, k, v, layer, scoring: Scoring, rotation=None) -> DenseAttended:
        assert isinstance(scoring.scale, np.float32)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(part, group, axis=1).astype(jnp.float32) for part in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k, precision="highest") * scoring.scale
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
        distance = self.positions[:, None] - self.positions[None, :]
        visible = (distance >= 0) & (distance < (scoring.window or len(self.positions)))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return DenseAttended(jnp.einsum("hqk,khd->qhd", weights, v, precision="highest").astype(q.dtype), self)

    def product(self, x: jax.Array, weight: Weight, layer, out_dtype) -> jax.Array:
        weight = weight if layer is None else take_layer(weight, layer)
        product = jnp.matmul(x.astype(jnp.float32), dequantize(weight, jnp.float32).T, precision="highest")
        return product.astype(out_dtype or x.dtype)

    def linear(self, x, matrix, layer=None, *, norm=None, out_dtype=None) -> jax.Array:
        return ComposedKernels.linear(self, x, (matrix,), layer, norm=norm, out_dtype=out_dtype)[0]

    def linears(self, x, matrices, layer, *, norm=None) -> tuple[jax.Array, ...]:
        return ComposedKernels.linear(self, x, matrices, layer, norm=norm)

    def gated(self, x, gate, up, layer, activation, *, norm=None) -> jax.Array:
        return ComposedKernels.linear(self, x, (gate, up), layer, norm=norm, activation=activation)[0]

    def normalize(self, x, norm, layer=None, *, split="whole") -> jax.Array:
        return normalize(x, norm, layer)

    def add_linear(self, residual, x, matrix, layer, *, norm=None, scale=1.0) -> jax.Array:
        return self._add(residual, self.linear(x, matrix, layer), layer, norm, scale)

    def add_experts(self, residual, x, routing, experts, layer, *, norm=None, scale=1.0) -> jax.Array:
        total = expert_mlp(_Products(), x, routing, experts, layer)
        return self._add(residual, total.astype(x.dtype), layer, norm, scale)

    def _add(self, residual, x, layer, norm, scale) -> jax.Array:
        x = x if norm is None else normalize(x, norm, layer)
        return residual + x * jnp.asarray(scale, x.dtype)

    def embed(self, ids: jax.Array, weight: Weight) -> jax.Array:
        return dequantize(take_rows(weight, ids), jnp.float32)

    def loop(self, num_layers, body, x):
        if self.unrolled:
            step = self
            for layer in range(num_layers):
                x, step = body(layer, x, step)
            return x, step
        return jax.lax.fori_loop(0, num_layers, lambda layer, carry: tuple(body(layer, *carry)), (x, self))


class _Products(ComposedKernels):
    """As much of a provider as experts and logits need."""

    def product(self, x: jax.Array, weight: Weight, layer, out_dtype) -> jax.Array:
        return DenseStep.product(self, x, weight, layer, out_dtype)


DENSE_OUTPUT = OutputProducts(_Products())


def logits_of(model: LoadedModel) -> Callable[..., jax.Array]:
    """A function of what `model.forward` takes, for the logits [rows, vocab] f32 of the same rows."""
    return lambda params, *given: model.logits(params, model.forward(params, *given).x, DENSE_OUTPUT)


class DenseModel:
    """A model over whole sequences of at most `length` tokens, compiled once.

    Sequences are filled up at the end with token 0, which no token before it can see.
    """

    def __init__(self, model: LoadedModel, length: int = 96, *, unrolled: bool = False) -> None:
        self.model = model
        self.length = length
        self._step = DenseStep(jnp.arange(length, dtype=jnp.int32), unrolled)
        self._logits = jax.jit(logits_of(model))

    def logits(self, ids) -> np.ndarray:
        """[len(ids), vocab] f32."""
        filled = np.zeros(self.length, np.int32)
        filled[: len(ids)] = ids
        rows = np.arange(self.length, dtype=np.int32)
        return np.asarray(self._logits(self.model.params, filled, self._step, rows))[: len(ids)]

    def last_logits(self, ids) -> np.ndarray:
        """[vocab] f32, of the token after `ids`; the product with the vocabulary is of one row."""
        filled = np.zeros(self.length, np.int32)
        filled[: len(ids)] = ids
        rows = np.array([len(ids) - 1], np.int32)
        return np.asarray(self._logits(self.model.params, filled, self._step, rows))[0]

    def greedy(self, ids, count: int) -> list[int]:
        """`count` tokens, each by a forward pass over everything before it."""
        sequence = [int(token) for token in ids]
        for _ in range(count):
            sequence.append(int(self.last_logits(sequence).argmax()))
        return sequence[len(ids) :]
