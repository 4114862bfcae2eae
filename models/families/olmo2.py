"""OLMo 2: norms after attention and MLP and none before, RMSNorm over the whole of q and of k."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel
from models.families.hf_model import biases_of, decoder_config, rope_of
from models.families.names import GGUF_NAMES, HF_NAMES, hf_layer


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    kinds = (LayerKind(rope=rope_of(fields)),)
    return decoder_config(fields, "olmo2", kinds, qk_norm="projection", norm_placement="after", **biases_of(fields))


def _gguf_config(model: GgufModel) -> DecoderConfig:
    return model.decoder_config((LayerKind(rope=model.rope()),), qk_norm="projection", norm_placement="after")


FAMILY = Family(
    name="olmo2",
    hf_architectures=frozenset({"Olmo2ForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES
    | hf_layer({"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}),
    hf_defaults={"rms_norm_eps": 1e-5},
    gguf=GgufFormat("olmo2", _gguf_config, GGUF_NAMES),
)
