"""Qwen 2 and 2.5: Llama with biases on q, k and v, and, where it is switched on, a window on the later layers."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel
from models.families.hf_model import decoder_config, rope_of, windows_of
from models.families.names import GGUF_NAMES, HF_NAMES

QWEN_DEFAULTS = {"sliding_window": 4096, "max_position_embeddings": 32768}


def qwen_kinds(fields: ConfigFields, *, all_windowed: bool = False) -> tuple[LayerKind, ...]:
    """Kinds of layers of every Qwen: a window, if any, from layer max_window_layers on, or in all of them."""
    window = fields.take("sliding_window", int, None)
    if not fields.take("use_sliding_window", bool, False):
        window = None
    first = fields.take("max_window_layers", int, 28)
    windows = windows_of(fields, window, lambda layer: all_windowed or layer >= first)
    rope = rope_of(fields)
    return tuple(LayerKind(each, rope) for each in windows)


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    return decoder_config(fields, "qwen2", qwen_kinds(fields), attention_bias=True)


def _gguf_config(model: GgufModel) -> DecoderConfig:
    return model.decoder_config((LayerKind(rope=model.rope()),))


FAMILY = Family(
    name="qwen2",
    hf_architectures=frozenset({"Qwen2ForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
    hf_defaults=QWEN_DEFAULTS | {"num_key_value_heads": 32},
    gguf=GgufFormat("qwen2", _gguf_config, GGUF_NAMES),
)
