"""Llama checkpoints with random weights, of any depth and size, for benchmarks and tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_random_llama(directory: Path, *, layers: int, hidden: int = 32, seed: int = 0, **settings: Any) -> Path:
    """A Hugging Face directory in float32; `settings` override fields of its config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **settings,
    }
    rng = np.random.default_rng(seed)
    kv = config["num_key_value_heads"] * config["head_dim"]
    heads = config["num_attention_heads"] * config["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (2 * hidden, hidden),
            "mlp.up_proj": (2 * hidden, hidden),
            "mlp.down_proj": (hidden, 2 * hidden),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    tensors = {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    norms = ["model.norm.weight"]
    norms += [
        f"model.layers.{layer}.{name}.weight"
        for layer in range(layers)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {name: np.ones(hidden, np.float32) for name in norms}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
