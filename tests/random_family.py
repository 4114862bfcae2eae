"""Random small models of every family: config.json in either layout, and tensors of the shapes it calls for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "arcee": "ArceeForCausalLM",
}
_WITH_BIAS = ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3", "arcee")
_WITH_WINDOW_TYPES = ("qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "smollm3")


class RandomModel(NamedTuple):
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, directory / "model.safetensors")
        return directory


@st.composite
def random_models(draw: st.DrawFn, family: str) -> RandomModel:
    """A model of `family`, of a few thousand parameters."""
    layers, kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from([4, 8, 10]))
    heads = kv_heads * draw(st.integers(1, 3))
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.sampled_from([8, 12])),
        "vocab_size": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "mistral"):
        config |= {"hidden_size": draw(st.sampled_from([12, 16])), "head_dim": head_dim}
    if family in _WITH_BIAS:
        config["attention_bias"] = draw(st.booleans())
    if family in ("llama", "granite", "smollm3", "arcee"):
        config["mlp_bias"] = draw(st.booleans())
    _draw_windows(draw, family, config)
    _draw_rope(draw, family, config, head_dim)
    if family.startswith("gemma"):
        caps = st.sampled_from([None, 2.0, 20.0])
        config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": draw(st.integers(1, 32))}
        config |= {"final_logit_softcapping": draw(caps)}
        config |= {"attn_logit_softcapping": draw(caps) if family == "gemma2" else None}
    if family == "granite":
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
            config[name] = draw(st.sampled_from([0.25, 0.75, 1.0, 3.0]))
    if family == "smollm3":
        config["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    if family in ("mixtral", "qwen3_moe"):
        experts = draw(st.integers(1, 5))
        count = (
            "num_local_experts" if family == "mixtral" else draw(st.sampled_from(["num_experts", "num_local_experts"]))
        )
        config |= {count: experts, "num_experts_per_tok": draw(st.integers(1, experts))}
    if family == "qwen3_moe":
        config |= {"moe_intermediate_size": 6, "norm_topk_prob": draw(st.booleans())}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return RandomModel(config, {name: _values(rng, name, shape, family) for name, shape in _shapes(config).items()})


def _draw_windows(draw: st.DrawFn, family: str, config: dict[str, Any]) -> None:
    layers, window = config["num_hidden_layers"], draw(st.integers(1, 12))
    if family in ("mistral", "mixtral", "phi3"):
        config["sliding_window"] = draw(st.sampled_from([None, window]))
    if family not in _WITH_WINDOW_TYPES:
        return
    config["sliding_window"] = window
    if not family.startswith("gemma"):
        config |= {"use_sliding_window": draw(st.booleans()), "max_window_layers": draw(st.integers(0, layers))}
        if not config["use_sliding_window"]:
            config["sliding_window"] = None
            return
    if family == "gemma3_text":
        config["sliding_window_pattern"] = draw(st.integers(2, 4))
    if draw(st.booleans()) or family == "smollm3":
        types = st.sampled_from(["full_attention", "sliding_attention"])
        config["layer_types"] = draw(st.lists(types, min_size=layers, max_size=layers))


def _stretches(family: str, config: dict[str, Any]) -> bool:
    """Whether some layer has the drawn RoPE: sliding layers of Gemma 3 have one of their own, and no other context."""
    if family != "gemma3_text":
        return True
    types = config.get("layer_types")
    return (
        config["num_hidden_layers"] >= config["sliding_window_pattern"] if types is None else "full_attention" in types
    )


def _draw_rope(draw: st.DrawFn, family: str, config: dict[str, Any], head_dim: int) -> None:
    kinds = ["default", "longrope", *(["linear", "dynamic", "llama3", "yarn"] if family != "phi3" else [])]
    kind, theta = draw(st.sampled_from(kinds)), draw(st.sampled_from([100.0, 10000.0]))
    fraction = draw(st.sampled_from([0.5, 1.0])) if family == "phi3" else 1.0
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        scaling["factor"] = draw(st.sampled_from([2.0, 8.0]))
    if kind in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = draw(st.sampled_from([16, 32]))
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([2.0, 4.0]))}
    if kind == "yarn":
        scaling |= draw(st.sampled_from([{}, {"attention_factor": 1.25}, {"mscale": 0.7, "mscale_all_dim": 1.0}]))
        scaling |= draw(st.sampled_from([{}, {"truncate": False}, {"beta_fast": 4.0, "beta_slow": 0.5}]))
    if kind == "dynamic" and _stretches(family, config):
        config["max_position_embeddings"] = draw(st.sampled_from([16, 128]))
    if kind == "longrope":
        pairs = -(-int(head_dim * fraction) // 2)
        scaling |= {
            "short_factor": [1.0 + 0.5 * at for at in range(pairs)],
            "long_factor": [4.0 + at for at in range(pairs)],
        }
        scaling |= draw(st.sampled_from([{}, {"attention_factor": 1.25}, {"factor": 3.0}]))
    if family == "phi3" and kind == "longrope":  # which says it beside its RoPE
        config["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    if draw(st.booleans()):
        if family == "phi3":
            scaling["partial_rotary_factor"] = fraction
        new = scaling | {"rope_theta": theta}
        local = {"rope_type": "default", "rope_theta": 50.0}
        is_gemma3 = family == "gemma3_text"
        config["rope_parameters"] = {"full_attention": new, "sliding_attention": local} if is_gemma3 else new
        return
    config |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
    if family == "phi3":
        config["partial_rotary_factor"] = fraction
    if family == "gemma3_text":
        config["rope_local_base_freq"] = 50.0


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    family, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv, inner = heads * head_dim, kv_heads * head_dim, config["intermediate_size"]
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    layer: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, out: int, into: int, has_bias: bool = False) -> None:
        layer[f"{name}.weight"] = (out, into)
        if has_bias:
            layer[f"{name}.bias"] = (out,)

    if family == "phi3":
        matrix("self_attn.qkv_proj", q + 2 * kv, hidden)
        matrix("mlp.gate_up_proj", 2 * inner, hidden)
        matrix("mlp.down_proj", hidden, inner)
    else:
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            matrix(f"self_attn.{name}_proj", size, hidden, bias or family == "qwen2")
    matrix("self_attn.o_proj", hidden, q, bias)
    if family in ("mixtral", "qwen3_moe"):
        mixtral = family == "mixtral"
        at, names = ("block_sparse_moe", "w1 w3 w2") if mixtral else ("mlp", "gate_proj up_proj down_proj")
        experts = config.get("num_local_experts") or config["num_experts"]
        matrix(f"{at}.gate", experts, hidden)
        inner = inner if mixtral else config["moe_intermediate_size"]
        for expert in range(experts):
            gate, up, down = names.split()
            matrix(f"{at}.experts.{expert}.{gate}", inner, hidden)
            matrix(f"{at}.experts.{expert}.{up}", inner, hidden)
            matrix(f"{at}.experts.{expert}.{down}", hidden, inner)
    elif family != "phi3":
        if family != "arcee":
            matrix("mlp.gate_proj", inner, hidden, mlp_bias)
        matrix("mlp.up_proj", inner, hidden, mlp_bias)
        matrix("mlp.down_proj", hidden, inner, mlp_bias)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if family == "olmo2":
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    layer |= {f"{name}.weight": (hidden,) for name in norms}
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"):
        whole = family == "olmo2"
        layer |= {
            "self_attn.q_norm.weight": (q if whole else head_dim,),
            "self_attn.k_norm.weight": (kv if whole else head_dim,),
        }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...], family: str) -> np.ndarray:
    if name.endswith("norm.weight"):
        centre = 0.0 if family.startswith("gemma") else 1.0
        return (centre + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
