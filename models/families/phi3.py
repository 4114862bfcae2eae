"""Phi 3 and 4: Llama with q, k, v and gate, up in one matrix each, RoPE on a part of each head, longrope."""

from __future__ import annotations

from models.assembly import Rows
from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel
from models.families.hf_model import decoder_config, rope_of
from models.families.names import GGUF_NAMES, HF_NAMES, consecutive, gguf_layer, hf_layer


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    fields.skip("embd_pdrop", "resid_pdrop")  # training
    fields.require("full_attn_mod", 1)
    fields.require("interpolate_factor", 1)
    fields.require("attention_bias", False)
    kinds = (LayerKind(fields.take("sliding_window", int, None), rope_of(fields, partial=True)),)
    return decoder_config(fields, "phi3", kinds)


def _gguf_config(model: GgufModel) -> DecoderConfig:
    window = model.size("attention.sliding_window", 0) or None
    return model.decoder_config((LayerKind(window, model.rope()),))


def _rows(config: DecoderConfig) -> dict[str, Rows]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"layers.attention.q.weight": q, "layers.attention.k.weight": kv, "layers.attention.v.weight": kv}
    mlp = dict.fromkeys(("layers.mlp.gate.weight", "layers.mlp.up.weight"), config.intermediate_size)
    return consecutive(attention) | consecutive(mlp)


_QKV, _GATE_UP = ("attention.q", "attention.k", "attention.v"), ("mlp.gate", "mlp.up")

FAMILY = Family(
    name="phi3",
    hf_architectures=frozenset({"Phi3ForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES
    | hf_layer(dict.fromkeys(_QKV, "self_attn.qkv_proj") | dict.fromkeys(_GATE_UP, "mlp.gate_up_proj")),
    hf_rows=_rows,
    hf_defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    gguf=GgufFormat(
        "phi3",
        _gguf_config,
        GGUF_NAMES | gguf_layer(dict.fromkeys(_QKV, "attn_qkv") | dict.fromkeys(_GATE_UP, "ffn_up")),
        _rows,
    ),
)
