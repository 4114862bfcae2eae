"""Arcee: Llama with an MLP that has no gate, of squared ReLU."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel, interleaved_rows
from models.families.hf_model import biases_of, decoder_config, rope_of
from models.families.names import GGUF_NAMES, HF_NAMES


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    fields.require("hidden_act", "relu2")
    kinds, bias = (LayerKind(rope=rope_of(fields)),), fields.take("mlp_bias", bool, False)
    return decoder_config(fields, "arcee", kinds, activation="relu2", gated=False, mlp_bias=bias, **biases_of(fields))


def _gguf_config(model: GgufModel) -> DecoderConfig:
    model.require("rope.dimension_count", model.head_dim)
    return model.decoder_config((LayerKind(rope=model.rope()),), activation="relu2", gated=False)


FAMILY = Family(
    name="arcee",
    hf_architectures=frozenset({"ArceeForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
    hf_defaults={"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    gguf=GgufFormat("arcee", _gguf_config, GGUF_NAMES, interleaved_rows),
)
