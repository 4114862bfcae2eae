"""Writes checkpoints for tests: model directories changed in one way, and GGUF files made from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from models.safetensors_loader import SafetensorsCheckpoint

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    checkpoint = SafetensorsCheckpoint(directory)
    return {name: np.array(checkpoint.read(name)) for name in checkpoint.names}


def copy_case(
    case: Path,
    to: Path,
    *,
    legacy: bool = False,
    config: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]] | None = None,
) -> Path:
    """A copy of a golden model: config in the older layout or updated, tensors passed through a function."""
    to.mkdir(parents=True, exist_ok=True)
    fields = json.loads((case / ("config_legacy.json" if legacy else "config.json")).read_text())
    fields |= config or {}
    (to / "config.json").write_text(json.dumps(fields))
    shutil.copy(case / "generation_config.json", to)
    if tensors is None:
        shutil.copy(case / "model.safetensors", to)
    else:
        save_file(dict(tensors(read_tensors(case))), to / "model.safetensors")
    return to


def write_shards(case: Path, to: Path, count: int = 3) -> Path:
    """The golden model with its tensors spread over `count` files and an index."""
    copy_case(case, to)
    (to / "model.safetensors").unlink()
    tensors = sorted(read_tensors(case).items())
    weight_map = {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = dict(tensors[shard::count])
        save_file(part, to / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    return to


def gguf_name(hf_name: str) -> str:
    stem, end = hf_name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{end}"
    return f"{GGUF_NAMES[stem]}.{end}"


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k the way GGUF orders them, written as its converter does."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def write_gguf(
    case: Path,
    path: Path,
    *,
    storage: Callable[[str], str] = lambda name: "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """The golden model as a GGUF file; matrices stored as `storage` of their GGUF name says, vectors as F32."""
    config = json.loads((case / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for key, value in ({**tiny_vocabulary(config["vocab_size"]), **(metadata or {})}).items():
        add_field(writer, key, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for hf_name, tensor in read_tensors(case).items():
        name = gguf_name(hf_name)
        part = name.split(".")[-2]
        tensor = interleave(tensor, heads[part]) if part in heads else tensor
        kind = gguf.GGMLQuantizationType[storage(name) if tensor.ndim == 2 else "F32"]
        raw = random_k_blocks(tensor.shape, kind) if kind in K_SCALES else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


K_SCALES = {
    gguf.GGMLQuantizationType.Q4_K: (0, 2),
    gguf.GGMLQuantizationType.Q5_K: (0, 2),
    gguf.GGMLQuantizationType.Q6_K: (208,),
}
"""Kinds that the gguf package reads and does not write, and where in a block their float16 numbers are."""


def random_k_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """A matrix of such a kind, uint8 [out, bytes]: any bits but in the float16 numbers, which are small."""
    rng = np.random.default_rng(seed)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, width), np.uint8)
    for offset in K_SCALES[kind]:
        scales = rng.uniform(-1e-4, 1e-4, (*raw.shape[:-1], 1)).astype(np.float16)
        raw[..., offset : offset + 2] = scales.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def byte_characters() -> list[str]:
    """GPT-2's stand-in character of each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tiny_vocabulary(size: int = 320) -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer: 3 special tokens, 256 bytes, a few merges, then unused tokens."""
    space, a, n = byte_characters()[32], "a", "n"
    merges = [f"{a} {n}", f"{space} an", "an an", "1 2"]
    tokens = ["<|end|>", "<|start|>", "<tool>", *byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    types = [3, 3, 4] + [1] * (len(tokens) - 3)
    filler = [f"<unused{index}>" for index in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + filler,
        "tokenizer.ggml.token_type": types + [5] * len(filler),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)
