"""Gemma 2: norms before and after, soft caps, every other layer with a window, embeddings scaled by sqrt(hidden)."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel
from models.families.hf_model import biases_of, decoder_config, positive, rope_of, windows_of
from models.families.names import GGUF_NAMES, HF_NAMES, hf_layer

GEMMA_HF_NAMES = HF_NAMES | hf_layer(
    {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)
GEMMA_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "tie_word_embeddings": True}
_LAYERS_OF_27B = 46


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("hidden_act", "gelu_pytorch_tanh")  # what older files say besides
    window = fields.take("sliding_window", int, None)
    fields.require("sliding_window_size", window)  # some files say it twice
    windows = windows_of(fields, window, lambda layer: layer % 2 == 0)
    rope = rope_of(fields)
    return decoder_config(
        fields,
        "gemma2",
        [LayerKind(window, rope) for window in windows],
        activation="gelu_tanh",
        norm_placement="both",
        attention_scale=positive(fields, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=fields.take("attn_logit_softcapping", float, None),
        logit_soft_cap=fields.take("final_logit_softcapping", float, None),
        embedding_multiplier=fields.take("hidden_size", int) ** 0.5,
        **biases_of(fields),
    )


def _gguf_config(model: GgufModel) -> DecoderConfig:
    windows = model.windows(model.size("attention.sliding_window", 4096), lambda layer: layer % 2 == 0)
    rope = model.rope()
    hidden_size, num_heads = model.size("embedding_length"), model.size("attention.head_count")
    # The file does not say the scale; of the released sizes only the largest has another than its heads'.
    largest = model.size("block_count") == _LAYERS_OF_27B
    return model.decoder_config(
        [LayerKind(window, rope) for window in windows],
        activation="gelu_tanh",
        norm_placement="both",
        attention_scale=(hidden_size / num_heads) ** -0.5 if largest else None,
        attention_soft_cap=model.take("attn_logit_softcapping", float, 50.0),
        logit_soft_cap=model.take("final_logit_softcapping", float, 30.0),
        embedding_multiplier=hidden_size**0.5,
    )


FAMILY = Family(
    name="gemma2",
    hf_architectures=frozenset({"Gemma2ForCausalLM"}),
    hf_config=_hf_config,
    hf_names=GEMMA_HF_NAMES,
    hf_norm_offset=1.0,  # stored is w of (1 + w)
    hf_defaults=GEMMA_DEFAULTS
    | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    gguf=GgufFormat("gemma2", _gguf_config, GGUF_NAMES),
)
