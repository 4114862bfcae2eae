"""The decoder network: pre-norm, rotary attention with grouped K/V heads, gated MLP.

All layers' parameters are stacked on a leading axis and every module takes the layer index, so one layer is compiled
whatever the depth and no layer's weights are sliced out. A module is built with abstract parameters (shapes only): that
one description is what loaders fill, and `nnx.merge(graph, params)` puts real weights in inside the traced function,
where they are arguments and never constants. Norms and RoPE are computed in float32 and logits are float32; everything
else is in the compute dtype, each product accumulated in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kv_kernels.provider import Affine, Norm, Rotation, Scoring
from kv_kernels.step_view import StepView
from kv_kernels.tensor_parallel import Split
from kv_kernels.weights import DenseWeight, LayerIndex
from models.config import DecoderConfig
from models.rope import inverse_frequencies, rotation


class Carry(NamedTuple):
    """x [tokens, hidden] and the step after a part of a layer."""

    x: jax.Array
    step: StepView


class Forward(NamedTuple):
    """logits [rows, vocab] f32, and the step with all K/V appended."""

    logits: jax.Array
    step: StepView


def _abstract(shape: tuple[int, ...]) -> Any:
    """A parameter's description, in the place of its array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Embedding(nnx.Module):
    """Token embedding [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self.weight = nnx.Param(DenseWeight(_abstract((vocab_size, hidden_size))))

    @property
    def matrix(self) -> Affine:
        """The embedding as the output product of a model that ties them."""
        return Affine(self.weight.get_value())

    def __call__(self, token_ids: jax.Array, step: StepView) -> jax.Array:
        return step.embed(token_ids, self.weight.get_value())


class RMSNorm(nnx.Module):
    """weight [*stack, features] f32; computed by the product that follows it."""

    def __init__(self, features: int, eps: float, stack: tuple[int, ...] = ()) -> None:
        self.weight = nnx.Param(_abstract((*stack, features)))
        self.eps = eps

    @property
    def norm(self) -> Norm:
        """What a product takes."""
        return Norm(self.weight.get_value(), self.eps)


class Linear(nnx.Module):
    """x [tokens, in] -> [tokens, out]; weight [*stack, out, in], bias [*stack, out] f32 or None.

    `split`: how tensor parallelism spreads it. What is split by inputs goes to `StepView.add_linear`, which adds its
    bias once, so that every rank has all of that.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        split: Split,
        bias: bool = False,
        stack: tuple[int, ...] = (),
    ) -> None:
        self.weight = nnx.Param(DenseWeight(_abstract((*stack, out_features, in_features))), split=split)
        bias_split = "whole" if split == "inputs" else split
        self.bias = nnx.Param(_abstract((*stack, out_features)), split=bias_split) if bias else None

    @property
    def matrix(self) -> Affine:
        """What a product takes."""
        return Affine(self.weight.get_value(), None if self.bias is None else self.bias.get_value())


class Attention(nnx.Module):
    """Grouped-query attention through the step's K/V view; the scale is always passed explicitly."""

    def __init__(self, config: DecoderConfig) -> None:
        stack = (config.num_layers,)
        q_features, kv_features = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q = Linear(config.hidden_size, q_features, split="outputs", bias=bias, stack=stack)
        self.k = Linear(config.hidden_size, kv_features, split="kv_outputs", bias=bias, stack=stack)
        self.v = Linear(config.hidden_size, kv_features, split="kv_outputs", bias=bias, stack=stack)
        self.o = Linear(q_features, config.hidden_size, split="inputs", bias=bias, stack=stack)
        self.head_dim = config.head_dim
        self.scoring = Scoring(np.float32(config.head_dim**-0.5))

    def __call__(self, x: jax.Array, norm: Norm, step: StepView, layer: LayerIndex, by: Rotation) -> Carry:
        matrices = (self.q.matrix, self.k.matrix, self.v.matrix)
        q, k, v = (part.reshape(x.shape[0], -1, self.head_dim) for part in step.linears(x, matrices, layer, norm=norm))
        values, step = step.attend(q, k, v, layer, self.scoring, by)
        return Carry(step.add_linear(x, values.reshape(x.shape[0], -1), self.o.matrix, layer), step)


class Mlp(nnx.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, config: DecoderConfig) -> None:
        stack, bias = (config.num_layers,), config.mlp_bias
        self.gate = Linear(config.hidden_size, config.intermediate_size, split="outputs", bias=bias, stack=stack)
        self.up = Linear(config.hidden_size, config.intermediate_size, split="outputs", bias=bias, stack=stack)
        self.down = Linear(config.intermediate_size, config.hidden_size, split="inputs", bias=bias, stack=stack)

    def __call__(self, x: jax.Array, norm: Norm, step: StepView, layer: LayerIndex) -> jax.Array:
        wide = step.gated(x, self.gate.matrix, self.up.matrix, layer, "silu", norm=norm)
        return step.add_linear(x, wide, self.down.matrix, layer)


class DecoderLayers(nnx.Module):
    """Every layer's parameters, stacked; one call computes one layer."""

    def __init__(self, config: DecoderConfig) -> None:
        stack = (config.num_layers,)
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, stack)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, stack)
        self.mlp = Mlp(config)

    def __call__(self, x: jax.Array, step: StepView, layer: LayerIndex, by: Rotation) -> Carry:
        x, step = self.attention(x, self.attention_norm.norm, step, layer, by)
        return Carry(self.mlp(x, self.mlp_norm.norm, step, layer), step)


class Decoder(nnx.Module):
    """Token ids to logits. The output product reuses the embedding where the model ties them."""

    def __init__(self, config: DecoderConfig, dtype: str) -> None:
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = DecoderLayers(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.output = (
            None if config.tied_embeddings else Linear(config.hidden_size, config.vocab_size, split="vocabulary")
        )
        self.config = config
        self.dtype = dtype

    def __call__(self, token_ids: jax.Array, step: StepView, logit_rows: jax.Array) -> Forward:
        """Logits [rows, vocab] f32 of the tokens at `logit_rows` [rows] i32 among token_ids [tokens] i32."""
        by = rotation(step.positions, inverse_frequencies(self.config.rope, self.config.head_dim))

        def body(layer: LayerIndex, x: jax.Array, step: StepView) -> Carry:
            return self.layers(x, step, layer, by)

        x = self.embedding(token_ids, step).astype(self.dtype)
        x, step = step.loop(self.config.num_layers, body, x)
        # Rows are gathered before the product with the vocabulary: one row per sequence, not per token. x stays in the
        # compute dtype: a provider multiplies in x's, so a float32 x would widen the whole matrix.
        output = self.embedding if self.output is None else self.output
        logits = step.logits(x[logit_rows], output.matrix, self.config.vocab_size, norm=self.norm.norm)
        return Forward(logits, step)
