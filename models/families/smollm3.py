"""SmolLM 3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from models.config import DecoderConfig, LayerKind, ModelConfigError
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel, interleaved_rows
from models.families.hf_model import biases_of, decoder_config, positive, rope_of, windows_of
from models.families.names import GGUF_NAMES, HF_NAMES

_PERIOD = 4


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    num_layers, period = fields.take("num_hidden_layers", int), positive(fields, "no_rope_layer_interval", _PERIOD)
    rotated = fields.take("no_rope_layers", list, None)  # 1 where, against its name, a layer rotates
    rotated = [(layer + 1) % period != 0 for layer in range(num_layers)] if rotated is None else rotated
    if len(rotated) != num_layers or not all(each in (0, 1) for each in rotated):
        raise ModelConfigError(
            f"{fields.origin} has no_rope_layers={rotated}, expected 0 or 1 for {num_layers} layers: fix the file"
        )
    window = fields.take("sliding_window", int, None)
    if not fields.take("use_sliding_window", bool, False):
        window = None
    fields.skip("max_window_layers", "pretraining_tp")  # of other families, and not used
    windows = windows_of(fields, window, lambda layer: not rotated[layer])
    rope = rope_of(fields, theta=2e6)
    return decoder_config(
        fields,
        "smollm3",
        [LayerKind(each, rope if turns else None) for each, turns in zip(windows, rotated, strict=True)],
        mlp_bias=fields.take("mlp_bias", bool, False),
        **biases_of(fields),
    )


def _gguf_config(model: GgufModel) -> DecoderConfig:
    model.require("rope.dimension_count", model.head_dim)
    rope = model.rope()
    layers = range(model.size("block_count"))
    return model.decoder_config([LayerKind(rope=rope if (layer + 1) % _PERIOD else None) for layer in layers])


FAMILY = Family(
    name="smollm3",
    hf_architectures=frozenset({"SmolLM3ForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES,
    hf_defaults={"tie_word_embeddings": True, "max_position_embeddings": 32768, "num_key_value_heads": 4},
    gguf=GgufFormat("smollm3", _gguf_config, GGUF_NAMES, interleaved_rows),
)
