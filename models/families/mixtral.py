"""Mixtral: Mistral with a mixture of experts. In GGUF it is a llama."""

from __future__ import annotations

from models.config import DecoderConfig, ExpertConfig, LayerKind
from models.config_fields import ConfigFields
from models.families.family import Family
from models.families.hf_model import decoder_config, rope_of
from models.families.names import HF_NAMES, hf_layer


def _hf_config(fields: ConfigFields) -> DecoderConfig:
    fields.skip("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # training
    kinds = (LayerKind(fields.take("sliding_window", int, None), rope_of(fields, theta=1e6)),)
    experts = ExpertConfig(fields.take("num_local_experts", int, 8), fields.take("num_experts_per_tok", int, 2))
    return decoder_config(fields, "mixtral", kinds, experts=experts)


_EXPERT = "block_sparse_moe.experts.{expert}"

FAMILY = Family(
    name="mixtral",
    hf_architectures=frozenset({"MixtralForCausalLM"}),
    hf_config=_hf_config,
    hf_names=HF_NAMES
    | hf_layer(
        {
            "mlp.router": "block_sparse_moe.gate",
            "mlp.expert_gate": f"{_EXPERT}.w1",
            "mlp.expert_up": f"{_EXPERT}.w3",
            "mlp.expert_down": f"{_EXPERT}.w2",
        }
    ),
    hf_defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
)
