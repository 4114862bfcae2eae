"""Granite 3: Llama with multipliers of embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel, interleaved_rows
from models.families.hf_model import biases_of, decoder_config, rope_of
from models.families.names import GGUF_NAMES, HF_NAMES


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    return decoder_config(
        fields,
        "granite",
        (LayerKind(rope=rope_of(fields)),),
        attention_scale=fields.take("attention_multiplier", float, 1.0),
        embedding_multiplier=fields.take("embedding_multiplier", float, 1.0),
        residual_multiplier=fields.take("residual_multiplier", float, 1.0),
        logit_divisor=fields.take("logits_scaling", float, 1.0),
        mlp_bias=fields.take("mlp_bias", bool, False),
        **biases_of(fields),
    )


def _gguf_config(model: GgufModel) -> DecoderConfig:
    model.require("rope.dimension_count", model.head_dim)
    model.require("rope.scaling.finetuned", True)  # false is how a Granite says that it does not rotate
    return model.decoder_config(
        (LayerKind(rope=model.rope()),),
        attention_scale=model.take("attention.scale", float, 0.0) or None,
        embedding_multiplier=model.take("embedding_scale", float, 0.0) or 1.0,
        residual_multiplier=model.take("residual_scale", float, 0.0) or 1.0,
        logit_divisor=model.take("logit_scale", float, 0.0) or 1.0,
    )


FAMILY = Family(
    name="granite",
    hf_architectures=frozenset({"GraniteForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
    gguf=GgufFormat("granite", _gguf_config, GGUF_NAMES, interleaved_rows),
)
