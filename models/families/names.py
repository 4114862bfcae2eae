"""Names of weights: those that most families share, and how a family says what it names otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from models.assembly import Rows


def hf_layer(parts: Mapping[str, str], ends: tuple[str, ...] = ("weight", "bias")) -> dict[str, str]:
    """Templates of a layer's parameters (`attention.q`) from their names in a Hugging Face layer."""
    return {
        f"layers.{path}.{end}": f"model.layers.{{layer}}.{name}.{end}" for path, name in parts.items() for end in ends
    }


def gguf_layer(parts: Mapping[str, str], ends: tuple[str, ...] = ("weight", "bias")) -> dict[str, str]:
    """Templates of a layer's parameters from their names in a GGUF block."""
    return {f"layers.{path}.{end}": f"blk.{{layer}}.{name}.{end}" for path, name in parts.items() for end in ends}


def consecutive(sizes: Mapping[str, int]) -> dict[str, Rows]:
    """Parameters that share a tensor: so many rows each, one after the other."""
    total, start, rows = sum(sizes.values()), 0, {}
    for path, size in sizes.items():
        rows[path] = Rows(np.arange(start, start + size), total)
        start += size
    return rows


HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "score.weight": "score.weight",
    **hf_layer(
        {
            "attention_norm": "input_layernorm",
            "attention.q": "self_attn.q_proj",
            "attention.k": "self_attn.k_proj",
            "attention.v": "self_attn.v_proj",
            "attention.o": "self_attn.o_proj",
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "mlp_norm": "post_attention_layernorm",
            "mlp.gate": "mlp.gate_proj",
            "mlp.up": "mlp.up_proj",
            "mlp.down": "mlp.down_proj",
        }
    ),
}

GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
    **gguf_layer(
        {
            "attention_norm": "attn_norm",
            "attention.q": "attn_q",
            "attention.k": "attn_k",
            "attention.v": "attn_v",
            "attention.o": "attn_output",
            "attention.q_norm": "attn_q_norm",
            "attention.k_norm": "attn_k_norm",
            "attention_out_norm": "post_attention_norm",
            "mlp_norm": "ffn_norm",
            "mlp.gate": "ffn_gate",
            "mlp.up": "ffn_up",
            "mlp.down": "ffn_down",
            "mlp.router": "ffn_gate_inp",
            "mlp.expert_gate": "ffn_gate_exps",
            "mlp.expert_up": "ffn_up_exps",
            "mlp.expert_down": "ffn_down_exps",
            "mlp_out_norm": "post_ffw_norm",
        }
    ),
}

SEPARATE_EXPERTS = gguf_layer(
    {f"mlp.expert_{part}": f"ffn_{part}.{{expert}}" for part in ("gate", "up", "down")}, ends=("weight",)
)
"""In GGUF files from before experts were stacked."""
