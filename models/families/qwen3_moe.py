"""Qwen 3 with a mixture of experts in every layer."""

from __future__ import annotations

from models.config import DecoderConfig, ExpertConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family, GgufFormat
from models.families.gguf_model import GgufModel
from models.families.hf_model import biases_of, decoder_config
from models.families.names import GGUF_NAMES, HF_NAMES, hf_layer
from models.families.qwen2 import QWEN_DEFAULTS, qwen_kinds


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    fields.skip("output_router_logits", "router_aux_loss_coef")  # training
    fields.skip("intermediate_size")  # of layers without experts, which are not implemented:
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [])
    count = fields.take("num_experts", int, fields.take("num_local_experts", int, 128))
    experts = ExpertConfig(
        count, fields.take("num_experts_per_tok", int, 8), fields.take("norm_topk_prob", bool, False)
    )
    return decoder_config(
        fields,
        "qwen3_moe",
        qwen_kinds(fields, all_windowed=True),
        intermediate_size=fields.take("moe_intermediate_size", int, 768),
        qk_norm="head",
        experts=experts,
        **biases_of(fields),
    )


def _gguf_config(model: GgufModel) -> DecoderConfig:
    experts = ExpertConfig(model.size("expert_count"), model.size("expert_used_count"))
    model.size("feed_forward_length", 0)  # of layers without experts
    inner = model.size("expert_feed_forward_length")
    kinds = (LayerKind(rope=model.rope()),)
    return model.decoder_config(kinds, intermediate_size=inner, qk_norm="head", experts=experts)


_EXPERT = "mlp.experts.{expert}"

FAMILY = Family(
    name="qwen3_moe",
    hf_architectures=frozenset({"Qwen3MoeForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES
    | hf_layer(
        {
            "mlp.router": "mlp.gate",
            "mlp.expert_gate": f"{_EXPERT}.gate_proj",
            "mlp.expert_up": f"{_EXPERT}.up_proj",
            "mlp.expert_down": f"{_EXPERT}.down_proj",
        }
    ),
    hf_defaults=QWEN_DEFAULTS | {"num_key_value_heads": 4},
    gguf=GgufFormat("qwen3moe", _gguf_config, GGUF_NAMES),
)
