"""GGUF files of the golden models, with the keys and the tensors that llama.cpp's converter writes for each family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_files import add_field, interleave, read_tensors, tiny_vocabulary

ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral_window": "llama",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "arcee": "arcee",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
}
"""By golden case."""

INTERLEAVED = ("llama", "granite", "smollm3", "arcee")
"""Architectures of rope type NORM, of which the converter reorders q and k."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}


def write_family_gguf(
    case: Path,
    path: Path,
    *,
    storage: Callable[[str], str] = lambda name: "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    separate_experts: bool = False,
) -> Path:
    """The golden model at `case` as a GGUF file; matrices stored as `storage` of their GGUF name says, vectors F32.

    separate_experts: a tensor for each, as in the first files of mixtures.
    """
    architecture = ARCHITECTURES[case.name]
    config = json.loads((case / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    fields = {f"{architecture}.{key}": config[name] for key, name in _SIZES.items() if config.get(name) is not None}
    ropes = config["rope_parameters"]
    fields[f"{architecture}.rope.freq_base"] = ropes.get("full_attention", ropes)["rope_theta"]
    if ropes.get("rope_type") == "yarn":
        original = ropes["original_max_position_embeddings"]
        scaling = {"type": "yarn", "factor": ropes["factor"], "original_context_length": original}
        fields |= {f"{architecture}.rope.scaling.{key}": value for key, value in scaling.items()}
    fields[f"{architecture}.vocab_size"] = config["vocab_size"]
    if architecture in INTERLEAVED or architecture == "phi3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        fields[f"{architecture}.rope.dimension_count"] = head_dim
    if architecture == "gemma3":  # the golden model's pattern is not that of the released ones
        fields["gemma3.attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config["layer_types"]
        ]
    for key, value in ({**tiny_vocabulary(config["vocab_size"]), **fields, **(metadata or {})}).items():
        add_field(writer, key, value)
    tensors = _converted(case, architecture, config)
    if separate_experts:
        tensors = _separated(tensors)
    for name, tensor in {**tensors, **(extra or {})}.items():
        kind = gguf.GGMLQuantizationType[storage(name) if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(case: Path, architecture: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The case's tensors under the names that the gguf package has for them."""
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in read_tensors(case).items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture in INTERLEAVED and name.split(".")[-2] in heads:
            tensor = interleave(tensor, heads[name.split(".")[-2]])
        if ".experts." in name:
            before, after = name.split(".experts.")
            number, part = after.split(".", 1)
            before = before.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            before = before if architecture == "llama" else f"model.{before}"
            experts.setdefault(f"{before}.experts.{part}", {})[int(number)] = tensor
        else:
            tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor
    for name, parts in experts.items():
        merged = np.stack([parts[number] for number in range(len(parts))])
        tensors[names.get_name(name, try_suffixes=(".weight",))] = merged
    return tensors


def _separated(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`blk.0.ffn_up_exps.weight` [experts, out, in] as `blk.0.ffn_up.0.weight`, ... [out, in]."""
    apart: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        parts = enumerate(tensor) if "_exps." in name else [(None, tensor)]
        apart |= {name if at is None else name.replace("_exps.", f".{at}."): each for at, each in parts}
    return apart
