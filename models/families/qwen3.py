"""Qwen 3: RMSNorm on each head's query and key, heads of a size of their own."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel
from models.families.hf_model import biases_of, decoder_config
from models.families.names import GGUF_NAMES, HF_NAMES
from models.families.qwen2 import QWEN_DEFAULTS, qwen_kinds


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    return decoder_config(fields, "qwen3", qwen_kinds(fields), qk_norm="head", **biases_of(fields))


def _gguf_config(model: GgufModel) -> DecoderConfig:
    return model.decoder_config((LayerKind(rope=model.rope()),), qk_norm="head")


FAMILY = Family(
    name="qwen3",
    hf_architectures=frozenset({"Qwen3ForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
    hf_defaults=QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
    gguf=GgufFormat("qwen3", _gguf_config, GGUF_NAMES),
)
