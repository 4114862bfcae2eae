"""The decoder network of every family: grouped-query attention and a gated MLP or a mixture of them, with the parts and
the numbers that its configuration names.

All layers' parameters are stacked on a leading axis and every module takes the layer index, so one layer is compiled
whatever the depth and no layer's weights are sliced out. A module is built with abstract parameters (shapes only): that
one description is what loaders fill, and `bind` puts real weights in inside the traced function, where they are
arguments and never constants. Norms and RoPE are computed in float32 and logits are float32; everything else is in the
compute dtype, each product accumulated in float32 and rounded once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.composition import activate, multiply
from kv_kernels.experts import Experts, route
from kv_kernels.output_products import OutputProducts
from kv_kernels.provider import Affine, Norm, Rotation, Scoring
from kv_kernels.step_view import StepView
from kv_kernels.tensor_parallel import Split
from kv_kernels.weights import LayerIndex
from models.config import DecoderConfig, LayerKind, NormPlacement, RopeConfig
from models.layer_spans import LayerSpan, layer_spans
from models.module import Module
from models.parts import Embedding, Linear, RMSNorm
from models.rope import inverse_frequencies, rotation


class Carry(NamedTuple):
    """x [tokens, hidden] and the step after a part of a layer."""

    x: jax.Array
    step: StepView


class Forward(NamedTuple):
    """x [rows, hidden] in the compute dtype, before the last norm, and the step with all K/V appended."""

    x: jax.Array
    step: StepView


class Hidden(NamedTuple):
    """hidden [tokens, hidden] f32, behind the last norm, and the step with all K/V appended."""

    hidden: jax.Array
    step: StepView


class Block(NamedTuple):
    """How a block stands on the residual stream: its result is x + scale * after(f(before(x)))."""

    before: Norm | None
    after: Norm | None
    scale: float


def _qk_norm(config: DecoderConfig, features: int, split: Split) -> RMSNorm | None:
    """The norm of queries or keys: of a projection it is spread like that, of a head every rank has it."""
    stack = (config.num_layers,)
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "head":
        return RMSNorm(config.head_dim, config.norm_eps, stack)
    return RMSNorm(features, config.norm_eps, stack, split)


class Attention(Module):
    """Grouped-query attention through the step's K/V view; the scale is always passed explicitly."""

    def __init__(self, config: DecoderConfig) -> None:
        linear = functools.partial(Linear, stack=(config.num_layers,), adapter_columns=config.adapter_columns)
        hidden, bias = config.hidden_size, config.attention_bias
        q_features, kv_features = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = linear(hidden, q_features, split="outputs", bias=bias)
        self.k = linear(hidden, kv_features, split="kv_outputs", bias=bias)
        self.v = linear(hidden, kv_features, split="kv_outputs", bias=bias)
        self.o = linear(q_features, hidden, split="inputs", bias=config.output_bias)
        self.q_norm = _qk_norm(config, q_features, "outputs")
        self.k_norm = _qk_norm(config, kv_features, "kv_outputs")
        self.qk_norm, self.head_dim = config.qk_norm, config.head_dim

    def __call__(
        self, x: jax.Array, block: Block, step: StepView, layer: LayerIndex, scoring: Scoring, by: Rotation | None
    ) -> Carry:
        q, k, v = step.linears(x, (self.q.matrix, self.k.matrix, self.v.matrix), layer, norm=block.before)
        if self.qk_norm == "projection":
            q, k = self._normalize(q, k, step, layer)
        q, k, v = (part.reshape(x.shape[0], -1, self.head_dim) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self._normalize(q, k, step, layer)
        values, step = step.attend(q, k, v, layer, scoring, by)
        values = values.reshape(x.shape[0], -1)
        return Carry(step.add_linear(x, values, self.o.matrix, layer, norm=block.after, scale=block.scale), step)

    def _normalize(self, q: jax.Array, k: jax.Array, step: StepView, layer: LayerIndex) -> tuple[jax.Array, jax.Array]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return (
            step.normalize(q, self.q_norm.norm, layer, split=self.q_norm.split),
            step.normalize(k, self.k_norm.norm, layer, split=self.k_norm.split),
        )


class Mlp(Module):
    """x + down(activation(gate(x)) * up(x)), or without a gate x + down(activation(up(x))); with the block's norms."""

    def __init__(self, config: DecoderConfig) -> None:
        linear = functools.partial(
            Linear, stack=(config.num_layers,), bias=config.mlp_bias, adapter_columns=config.adapter_columns
        )
        self.gate = linear(config.hidden_size, config.intermediate_size, split="outputs") if config.gated else None
        self.up = linear(config.hidden_size, config.intermediate_size, split="outputs")
        self.down = linear(config.intermediate_size, config.hidden_size, split="inputs")
        self.activation = config.activation

    def __call__(self, x: jax.Array, block: Block, step: StepView, layer: LayerIndex) -> jax.Array:
        if self.gate is None:
            wide = activate(step.linear(x, self.up.matrix, layer, norm=block.before), self.activation)
        else:
            wide = step.gated(x, self.gate.matrix, self.up.matrix, layer, self.activation, norm=block.before)
        return step.add_linear(x, wide, self.down.matrix, layer, norm=block.after, scale=block.scale)


class MixtureMlp(Module):
    """x + the weighted sum of the experts that a router chooses for each token, with the norms of its block."""

    def __init__(self, config: DecoderConfig) -> None:
        assert config.experts is not None
        self.router = Linear(config.hidden_size, config.experts.count, split="whole", stack=(config.num_layers,))
        stack = (config.num_layers, config.experts.count)
        self.expert_gate = Linear(config.hidden_size, config.intermediate_size, split="expert_outputs", stack=stack)
        self.expert_up = Linear(config.hidden_size, config.intermediate_size, split="expert_outputs", stack=stack)
        self.expert_down = Linear(config.intermediate_size, config.hidden_size, split="expert_inputs", stack=stack)
        self.activation = config.activation
        self.experts = config.experts

    def __call__(self, x: jax.Array, block: Block, step: StepView, layer: LayerIndex) -> jax.Array:
        normed = x if block.before is None else step.normalize(x, block.before, layer)
        logits = step.linear(normed, self.router.matrix, layer, out_dtype=jnp.float32)
        routing = route(logits, self.experts.chosen, renormalize=self.experts.renormalize)
        gate, up, down = (each.matrix.weight for each in (self.expert_gate, self.expert_up, self.expert_down))
        experts = Experts(gate, up, down, self.activation)
        return step.add_experts(x, normed, routing, experts, layer, norm=block.after, scale=block.scale)


class DecoderLayers(Module):
    """Every layer's parameters, stacked; one call computes one layer."""

    def __init__(self, config: DecoderConfig) -> None:
        def norm(*where: NormPlacement) -> RMSNorm | None:
            stack = (config.num_layers,)
            return RMSNorm(config.hidden_size, config.norm_eps, stack) if config.norm_placement in where else None

        self.attention_norm = norm("before", "both")
        self.attention = Attention(config)
        self.attention_out_norm = norm("after", "both")
        self.mlp_norm = norm("before", "both")
        self.mlp = Mlp(config) if config.experts is None else MixtureMlp(config)
        self.mlp_out_norm = norm("after", "both")
        self.residual_multiplier = config.residual_multiplier

    def __call__(self, x: jax.Array, step: StepView, layer: LayerIndex, scoring: Scoring, by: Rotation | None) -> Carry:
        block = self._block(self.attention_norm, self.attention_out_norm)
        x, step = self.attention(x, block, step, layer, scoring, by)
        return Carry(self.mlp(x, self._block(self.mlp_norm, self.mlp_out_norm), step, layer), step)

    def _block(self, before: RMSNorm | None, after: RMSNorm | None) -> Block:
        before_norm, after_norm = (None if each is None else each.norm for each in (before, after))
        return Block(before_norm, after_norm, self.residual_multiplier)


class Decoder(Module):
    """Token ids to hidden states, and those to logits. The output product reuses the embedding where the model ties
    them; a classifier of sequences has none, nor has a model that is for embeddings alone.
    """

    def __init__(self, config: DecoderConfig, dtype: str) -> None:
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = DecoderLayers(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        hidden, labels = config.hidden_size, config.num_labels
        has_output = labels is None and not config.tied_embeddings
        self.output = Linear(hidden, config.vocab_size, split="vocabulary") if has_output else None
        self.score = Linear(hidden, labels, split="whole") if labels else None
        self.config = config
        self.dtype = dtype

    def __call__(self, token_ids: jax.Array, step: StepView, logit_rows: jax.Array) -> Forward:
        """What `logits` takes, of the tokens at `logit_rows` [rows] i32 among token_ids [tokens] i32."""
        x, step = self._layers(token_ids, step)
        # x stays in the compute dtype: a provider multiplies in x's, so a float32 x would widen the output matrix.
        return Forward(x[logit_rows], step)

    def logits(self, x: jax.Array, products: OutputProducts) -> jax.Array:
        """Logits [rows, vocab] f32 of x [rows, hidden]."""
        config = self.config
        logits = products.logits(x, self._output, config.vocab_size, norm=self.norm.norm)
        if config.logit_divisor != 1:
            logits = logits / np.float32(config.logit_divisor)
        if config.logit_soft_cap is not None:
            cap = np.float32(config.logit_soft_cap)
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def most_likely(self, x: jax.Array, products: OutputProducts) -> jax.Array:
        """Where the largest of the logits of x [rows, hidden] is -> [rows] i32."""
        config = self.config
        if config.logit_divisor != 1 or config.logit_soft_cap is not None:
            # Both keep the order, but round numbers that differ to equal ones, of which the first is taken.
            return products.argmax(self.logits(x, products))
        return products.most_likely(x, self._output, config.vocab_size, norm=self.norm.norm)

    @property
    def _output(self) -> Affine:
        return (self.embedding if self.output is None else self.output).matrix

    def hidden(self, token_ids: jax.Array, step: StepView) -> Hidden:
        """Final hidden states of token_ids [tokens] i32."""
        x, step = self._layers(token_ids, step)
        return Hidden(step.normalize(x, self.norm.norm).astype(jnp.float32), step)

    def classify(self, hidden: jax.Array) -> jax.Array:
        """Scores [rows, labels] f32 of hidden states [rows, hidden] f32."""
        assert self.score is not None
        return multiply(hidden, self.score.matrix.weight, None, jnp.float32)

    def _layers(self, token_ids: jax.Array, step: StepView) -> Carry:
        config = self.config
        ropes = {kind.rope for kind in config.layer_kinds if kind.rope is not None}
        rotations = {rope: self._rotation(rope, step.positions) for rope in ropes}
        x = self.embedding(token_ids, step).astype(self.dtype)
        if config.embedding_multiplier != 1:
            # Rounded first, as the models that have it were trained: sqrt(hidden) is not a number of few bits.
            x = x * jnp.asarray(config.embedding_multiplier, self.dtype)
        for span in layer_spans(config.layer_kinds):
            x, step = self._run(span, x, step, rotations)
        return Carry(x, step)

    def _rotation(self, rope: RopeConfig, positions: jax.Array) -> Rotation:
        return rotation(positions, inverse_frequencies(rope, self.config.head_dim), rope.attention_factor)

    def _run(
        self, span: LayerSpan[LayerKind], x: jax.Array, step: StepView, rotations: dict[RopeConfig, Rotation]
    ) -> Carry:
        """A span of layers: one loop whose body holds the period, or the layer itself where it stands alone."""
        first, repeats, period = span
        config = self.config
        scale = np.float32(config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale)

        def body(repeat: LayerIndex, x: jax.Array, step: StepView) -> Carry:
            for offset, kind in enumerate(period):
                scoring = Scoring(scale, kind.window, config.attention_soft_cap)
                by = None if kind.rope is None else rotations[kind.rope]
                x, step = self.layers(x, step, first + repeat * len(period) + offset, scoring, by)
            return Carry(x, step)

        return Carry(*(body(0, x, step) if repeats == 1 else step.loop(repeats, body, x)))
