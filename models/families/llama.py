"""Llama (1 to 3.x, SmolLM2, fine-tunes): RMSNorm, rotary GQA/MQA, SwiGLU, optional biases, optional tied embeddings."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from models.config import ConfigFields, DecoderConfig, ModelConfigError, RopeConfig, UnsupportedModelError
from models.families.family import Family
from models.harmless_fields import HARMLESS_FIELDS

_ROPE_HARMLESS = frozenset({"rope_theta"})


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    hidden_size, num_heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    num_layers = fields.take("num_hidden_layers", int)
    if num_heads < 1 or ("head_dim" not in fields and hidden_size % num_heads):
        raise ModelConfigError(
            f"hidden_size {hidden_size} does not divide into {num_heads} heads: check {fields.origin}"
        )
    fields.require("hidden_act", "silu")
    fields.require("pretraining_tp", 1)
    fields.require("partial_rotary_factor", 1, 1.0)
    fields.require("layer_types", ["full_attention"] * num_layers)
    config = DecoderConfig(
        architecture="llama",
        vocab_size=fields.take("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.take("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.take("num_key_value_heads", int, num_heads),
        head_dim=fields.take("head_dim", int, hidden_size // num_heads),
        max_context=fields.take("max_position_embeddings", int, 2048),
        norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        rope=_hf_rope(fields),
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        tied_embeddings=fields.take("tie_word_embeddings", bool, False),
    )
    fields.refuse_unread(HARMLESS_FIELDS)
    return config


def _hf_rope(fields: ConfigFields) -> RopeConfig:
    """rope_parameters (transformers 5), or rope_theta beside rope_scaling (before)."""
    theta = fields.take("rope_theta", float, None)
    new, old = fields.take("rope_parameters", dict, None), fields.take("rope_scaling", dict, None)
    if new is not None and old is not None and new != old:
        raise ModelConfigError(f"{fields.origin} has both rope_parameters and rope_scaling, and they differ: keep one")
    rope = ConfigFields(new or old or {}, f"{fields.origin}'s {'rope_parameters' if new else 'rope_scaling'}")
    inner_theta = rope.take("rope_theta", float, None)
    if theta is not None and inner_theta is not None and theta != inner_theta:
        raise ModelConfigError(f"{fields.origin} has two values of rope_theta, {theta:g} and {inner_theta:g}: keep one")
    theta = next((value for value in (inner_theta, theta) if value is not None), 10000.0)
    kind = rope.take("type", str, None)
    kind = rope.take("rope_type", str, kind or "default")
    rope.require("partial_rotary_factor", 1, 1.0)
    if kind == "default":
        config = RopeConfig(theta=theta)
    elif kind == "linear":
        config = RopeConfig(theta=theta, kind="linear", factor=rope.take("factor", float))
    elif kind == "llama3":
        config = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.take("factor", float),
            low_freq_factor=rope.take("low_freq_factor", float),
            high_freq_factor=rope.take("high_freq_factor", float),
            original_context=rope.take("original_max_position_embeddings", int),
        )
    else:
        raise UnsupportedModelError(
            f"{rope.origin} has RoPE type {kind!r}, implemented are default, linear, llama3: use a model with one "
            "of those"
        )
    rope.refuse_unread(_ROPE_HARMLESS)
    return config


# GGUF keys below `llama.` that describe and do not compute.
_GGUF_HARMLESS = frozenset({"llama.tensor_data_layout", "llama.leading_dense_block_count"})


def _gguf_config(
    fields: ConfigFields, tensor_names: Collection[str], frequency_divisors: tuple[float, ...] | None
) -> DecoderConfig:
    hidden_size, num_heads = (
        _gguf_int(fields, "llama.embedding_length"),
        _gguf_int(fields, "llama.attention.head_count"),
    )
    if num_heads < 1:
        raise ModelConfigError(f"llama.attention.head_count is {num_heads}; it must be at least 1: get the file again")
    head_dim = _gguf_int(fields, "llama.attention.key_length", hidden_size // num_heads)
    fields.require("llama.attention.value_length", head_dim)
    fields.require("llama.rope.dimension_count", head_dim)
    fields.require("llama.attention.causal", True)
    fields.require("llama.expert_count", 0)
    fields.require("llama.expert_used_count", 0)
    for scale in ("llama.attention.scale", "llama.logit_scale", "llama.residual_scale", "llama.embedding_scale"):
        fields.require(scale, 0.0)  # what converters write for "not scaled"
    tied = "output.weight" not in tensor_names
    config = DecoderConfig(
        architecture="llama",
        vocab_size=_gguf_int(fields, "llama.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_gguf_int(fields, "llama.feed_forward_length"),
        num_layers=_gguf_int(fields, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_gguf_int(fields, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=_gguf_int(fields, "llama.context_length"),
        norm_eps=fields.take("llama.attention.layer_norm_rms_epsilon", float),
        rope=_gguf_rope(fields, frequency_divisors),
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        tied_embeddings=tied,
    )
    fields.refuse_unread(_GGUF_HARMLESS)
    return config


def _gguf_rope(fields: ConfigFields, frequency_divisors: tuple[float, ...] | None) -> RopeConfig:
    theta = fields.take("llama.rope.freq_base", float, 10000.0)
    kind = fields.take("llama.rope.scaling.type", str, "none")
    linear_key = "llama.rope.scale_linear"  # how older files say it
    factor = fields.take("llama.rope.scaling.factor", float, fields.take(linear_key, float, 1.0))
    fields.take("llama.rope.scaling.original_context_length", int, 0)  # used by yarn only
    fields.take("llama.rope.scaling.finetuned", bool, False)  # says how the model was trained
    fields.require("llama.rope.scaling.attn_factor", 1.0)
    if linear_key in fields and kind == "none":
        kind = "linear"
    if kind == "none":
        return RopeConfig(theta=theta, frequency_divisors=frequency_divisors)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, frequency_divisors=frequency_divisors)
    raise UnsupportedModelError(
        f"{fields.origin} has llama.rope.scaling.type={kind!r}, implemented are none, linear and a rope_freqs tensor: "
        "use a model with one of those"
    )


def _gguf_int(fields: ConfigFields, name: str, default: int | None = None) -> int:
    """An integer that some converters write once per layer."""
    if isinstance(fields.peek(name), list):
        values = set(fields.take(name, list))
        if len(values) != 1:
            raise UnsupportedModelError(
                f"{fields.origin} has {name} that differs between layers: use a model with one value"
            )
        return int(values.pop())
    return fields.take(name, int) if default is None else fields.take(name, int, default)


def _gguf_row_orders(config: DecoderConfig) -> dict[str, np.ndarray]:
    """GGUF keeps a rotated pair in neighboring rows (2i, 2i+1 of a head); we keep it head_dim/2 apart."""
    orders = {}
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        rows = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        orders[f"layers.attention.{name}.weight"] = orders[f"layers.attention.{name}.bias"] = rows
    return orders


_PARTS = {
    "layers.attention_norm": ("input_layernorm", "attn_norm"),
    "layers.attention.q": ("self_attn.q_proj", "attn_q"),
    "layers.attention.k": ("self_attn.k_proj", "attn_k"),
    "layers.attention.v": ("self_attn.v_proj", "attn_v"),
    "layers.attention.o": ("self_attn.o_proj", "attn_output"),
    "layers.mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "layers.mlp.gate": ("mlp.gate_proj", "ffn_gate"),
    "layers.mlp.up": ("mlp.up_proj", "ffn_up"),
    "layers.mlp.down": ("mlp.down_proj", "ffn_down"),
}
_HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
}
for _path, (_hf, _gguf) in _PARTS.items():
    for _end in ("weight", "bias"):
        _HF_NAMES[f"{_path}.{_end}"] = f"model.layers.{{layer}}.{_hf}.{_end}"
        _GGUF_NAMES[f"{_path}.{_end}"] = f"blk.{{layer}}.{_gguf}.{_end}"

FAMILY = Family(
    name="llama",
    hf_architectures=frozenset({"LlamaForCausalLM"}),
    hf_config=_hf_config,
    gguf_config=_gguf_config,
    hf_names=_HF_NAMES,
    gguf_names=_GGUF_NAMES,
    gguf_row_orders=_gguf_row_orders,
    # Old checkpoints saved the inverse frequencies, which are a function of the configuration.
    hf_ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
    gguf_ignored=(r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd"),
)
