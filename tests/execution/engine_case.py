"""Engines over small models for tests: the golden checkpoints, and random ones of any depth."""

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kv_execution import EngineConfig, PagedEngine
from models import LoadedModel, load_model

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"


@functools.cache
def golden_model(case: str, dtype: str = "float32") -> LoadedModel:
    """A golden checkpoint; loaded once for all tests."""
    return load_model(GOLDEN / case, dtype=dtype)


def make_engine(model: LoadedModel, *, pages: int | None = None, **settings) -> PagedEngine:
    """An initialised engine with small shapes; `pages` usable pages where given."""
    settings = {"max_requests": 4, "max_step_tokens": 64, "max_context": 128, "kv_pool_bytes": 1 << 20, **settings}
    if pages is not None:
        spec, tokens_per_page = model.spec, settings.get("tokens_per_page", 16)
        itemsize = 4 if spec.dtype == "float32" else 2
        page_bytes = 2 * spec.num_layers * tokens_per_page * spec.num_kv_heads * spec.head_dim * itemsize
        settings["kv_pool_bytes"] = (pages + 1) * page_bytes
    engine = PagedEngine(model, EngineConfig(**settings))
    engine.init_paged_runtime()
    return engine


def golden_prompts(case: str) -> list[np.ndarray]:
    expected = np.load(GOLDEN / case / "expected.npz")
    return [expected[f"prompt_{index}"] for index in range(4)]


def write_random_llama(directory: Path, *, layers: int, hidden: int = 32, seed: int = 0, **config) -> Path:
    """A Hugging Face directory with random weights."""
    config = {
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
        **config,
    }
    rng = np.random.default_rng(seed)
    kv = config["num_key_value_heads"] * config["head_dim"]
    heads = config["num_attention_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "lm_head.weight": (config["vocab_size"], hidden)}
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
    norms += [f"model.layers.{layer}.{name}.weight" for layer in range(layers) for name in ("input_layernorm", "post_attention_layernorm")]
    tensors |= {name: np.ones(hidden, np.float32) for name in norms}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
