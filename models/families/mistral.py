"""Mistral: Llama with a window on every layer in its first release. In GGUF it is a llama."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family
from models.families.hf_model import decoder_config, rope_of
from models.families.names import HF_NAMES


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    # Null says that there is none; a file that says nothing has the first release's.
    window = fields.take("sliding_window", int, None if fields.states("sliding_window") else 4096)
    return decoder_config(fields, "mistral", (LayerKind(window, rope_of(fields)),))


FAMILY = Family(
    name="mistral",
    hf_architectures=frozenset({"MistralForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
)
