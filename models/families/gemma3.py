"""Gemma 3, text: as Gemma 2 without soft caps, with q and k norms, and a RoPE of its own in layers with a window."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind, RopeConfig
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gemma2 import GEMMA_DEFAULTS, GEMMA_HF_NAMES
from models.families.gguf_model import GgufModel
from models.families.hf_model import biases_of, decoder_config, positive, rope_of, windows_of
from models.families.names import GGUF_NAMES

_PERIOD = 6
_LAYERS_OF_27B = 62


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("hidden_act", "gelu_pytorch_tanh")
    stated = "sliding_window_pattern" if "sliding_window_pattern" in fields else "_sliding_window_pattern"
    fields.skip("_sliding_window_pattern")
    period = positive(fields, stated, _PERIOD)
    window = fields.take("sliding_window", int, None)
    windows = windows_of(fields, window, lambda layer: (layer + 1) % period != 0)
    everywhere = rope_of(fields, theta=fields.take("rope_theta", float, 1e6), layer_type="full_attention")
    nearby = RopeConfig(theta=fields.take("rope_local_base_freq", float, 10000.0))
    if "rope_parameters" in fields:
        nearby = rope_of(fields, theta=nearby.theta, layer_type="sliding_attention")
    return decoder_config(
        fields,
        "gemma3_text",
        [LayerKind(window, everywhere if window is None else nearby) for window in windows],
        activation="gelu_tanh",
        qk_norm="head",
        norm_placement="both",
        attention_scale=positive(fields, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=fields.take("attn_logit_softcapping", float, None),
        logit_soft_cap=fields.take("final_logit_softcapping", float, None),
        embedding_multiplier=fields.take("hidden_size", int) ** 0.5,
        **biases_of(fields),
    )


def _gguf_config(model: GgufModel) -> DecoderConfig:
    window = model.size("attention.sliding_window", 0) or None
    windows = model.windows(window, lambda layer: (layer + 1) % _PERIOD != 0)
    everywhere, nearby = model.rope(), RopeConfig(theta=model.take("rope.freq_base_swa", float, 10000.0))
    hidden_size, num_heads = model.size("embedding_length"), model.size("attention.head_count")
    # The file does not say the scale; of the released sizes only the largest has another than its heads'.
    largest = model.size("block_count") == _LAYERS_OF_27B
    return model.decoder_config(
        [LayerKind(each, everywhere if each is None else nearby) for each in windows],
        activation="gelu_tanh",
        qk_norm="head",
        norm_placement="both",
        attention_scale=(hidden_size / num_heads) ** -0.5 if largest else None,
        logit_soft_cap=model.take("final_logit_softcapping", float, None),
        embedding_multiplier=hidden_size**0.5,
    )


FAMILY = Family(
    name="gemma3_text",
    hf_architectures=frozenset({"Gemma3ForCausalLM"}),
    hf_config=_hf_config,
    hf_names=GEMMA_HF_NAMES,
    hf_norm_offset=1.0,  # stored is w of (1 + w)
    hf_defaults=GEMMA_DEFAULTS | {"max_position_embeddings": 131072},
    gguf=GgufFormat("gemma3", _gguf_config, GGUF_NAMES),
)
