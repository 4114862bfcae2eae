"""Llama (1 to 3.x, SmolLM2, fine-tunes): RMSNorm, rotary GQA/MQA, SwiGLU, optional biases, optional tied embeddings.

GGUF files of this architecture also hold Mistral (a window) and Mixtral (experts).
"""

from __future__ import annotations

from models.config import DecoderConfig, ExpertConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel, interleaved_rows
from models.families.hf_model import biases_of, decoder_config, rope_of, windows_of
from models.families.names import GGUF_NAMES, HF_NAMES


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    fields.require("pretraining_tp", 1)
    windows_of(fields, None, lambda layer: False)
    kinds = (LayerKind(rope=rope_of(fields)),)
    mlp_bias = fields.take("mlp_bias", bool, False)
    return decoder_config(fields, "llama", kinds, mlp_bias=mlp_bias, **biases_of(fields))


def _gguf_config(model: GgufModel) -> DecoderConfig:
    model.require("rope.dimension_count", model.head_dim)
    kinds = (LayerKind(model.size("attention.sliding_window", 0) or None, model.rope()),)
    experts = model.size("expert_count", 0)
    if not experts:
        return model.decoder_config(kinds)
    return model.decoder_config(kinds, experts=ExpertConfig(experts, model.size("expert_used_count")))


FAMILY = Family(
    name="llama",
    hf_architectures=frozenset({"LlamaForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
    gguf=GgufFormat("llama", _gguf_config, GGUF_NAMES, interleaved_rows),
)
