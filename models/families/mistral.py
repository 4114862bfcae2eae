"""Mistral: Llama with a window on every layer in its first release. In GGUF it is a llama."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family
from models.families.hf_model import decoder_config, rope_of
from models.families.names import HF_NAMES


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    return decoder_config(fields, "mistral", (LayerKind(fields.take("sliding_window", int, None), rope_of(fields)),))


FAMILY = Family(
    name="mistral",
    hf_architectures=frozenset({"MistralForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
    hf_defaults={"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8},
)
