"""What each family's configuration says is understood whole, or refused by name in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_common.errors import JaxkvError
from models.config import DecoderConfig, LayerKind, RopeConfig
from models.context import fit_context
from models.families import FAMILIES, family_of

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"
ALL_CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config_legacy.json"))
ABSENT = "absent"


def parse(case: str, **changes: Any) -> DecoderConfig:
    fields = json.loads((GOLDEN / case / "config.json").read_text()) | changes
    fields = {name: value for name, value in fields.items() if value != ABSENT}
    return fit_context(family_of(fields["model_type"], "config.json").read_config(fields), None, "config.json")


def rope_of(config: DecoderConfig) -> RopeConfig:
    (rope,) = {kind.rope for kind in config.layer_kinds}
    assert rope is not None
    return rope


def test_a_family_is_less_than_a_hundred_lines() -> None:
    for family in FAMILIES.values():
        assert len(Path(sys.modules[family.hf_config.__module__].__file__).read_text().splitlines()) < 100, family.name


def test_every_family_is_found_by_its_module() -> None:
    assert sorted(FAMILIES) == [
        *(
            "arcee",
            "gemma2",
            "gemma3_text",
            "granite",
            "llama",
            "mistral",
            "mixtral",
            "olmo2",
            "phi3",
            "qwen2",
            "qwen3",
        ),
        *("qwen3_moe", "smollm3"),
    ]


def test_a_window_that_is_switched_off_is_none() -> None:
    assert parse("mistral_window", sliding_window=None).windows == (None, None)
    assert parse("qwen2", sliding_window=8, use_sliding_window=False).windows == (None, None)
    assert set(parse("gemma3", sliding_window=None, layer_types=ABSENT).windows) == {None}


def test_a_window_that_is_not_stated_is_the_family_s_own() -> None:
    assert parse("mistral_window", sliding_window=ABSENT).windows == (4096, 4096)
    assert parse("mixtral", sliding_window=ABSENT).windows == (None, None)


def test_the_later_layers_of_qwen_have_the_window() -> None:
    window = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ABSENT}
    assert parse("qwen2", max_window_layers=1, **window).windows == (None, 8)


def test_every_fourth_layer_of_smollm3_does_not_rotate() -> None:
    config = parse("smollm3", no_rope_layers=ABSENT, num_hidden_layers=9, layer_types=ABSENT)
    assert [layer for layer, kind in enumerate(config.layer_kinds) if kind.rope is None] == [3, 7]


def test_a_soft_cap_of_null_is_none_and_one_that_is_absent_has_its_default() -> None:
    off = parse("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.attention_soft_cap, off.logit_soft_cap) == (None, None)
    default = parse("gemma2", attn_logit_softcapping=ABSENT, final_logit_softcapping=ABSENT)
    assert (default.attention_soft_cap, default.logit_soft_cap) == (50.0, 30.0)


def test_gemma_3_rotates_by_the_kind_of_a_layer() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    config = parse("gemma3", rope_parameters={"full_attention": scaled, "sliding_attention": local})
    assert config.layer_kinds[0] == LayerKind(16, RopeConfig(1e4))
    assert config.layer_kinds[2] == LayerKind(None, RopeConfig(1e6, "linear", factor=8.0))


def test_yarn_stretches_the_context_that_the_file_states() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
    config = parse("qwen2", rope_parameters=yarn)
    assert config.max_context == 2048
    assert rope_of(config).attention_factor == pytest.approx(1.138629, rel=1e-6)


def test_every_layer_of_a_mixture_of_qwen_has_the_window() -> None:
    window = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ABSENT}
    assert parse("qwen3_moe", max_window_layers=1, **window).windows == (8, 8)


def test_what_a_file_says_beside_its_rope_is_the_context_of_training() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    inner, outer = (
        parse("qwen2", rope_parameters=yarn),
        parse("qwen2", rope_parameters=yarn, original_max_position_embeddings=128),
    )
    assert (rope_of(inner).original_context, rope_of(outer).original_context) == (64, 128)


def test_a_factor_that_longrope_states_goes_before_the_ratio_of_contexts() -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "rope_theta": 1e4,
    }
    config = parse("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert rope_of(config).attention_factor == pytest.approx((1 + 2 / 6) ** 0.5)


def test_dynamic_scaling_is_none_within_the_context_that_it_has() -> None:
    config = parse("qwen2", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6})
    assert (rope_of(config), config.max_context) == (RopeConfig(1e6), 512)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_has_the_context_of_its_short_factors(kind: str) -> None:
    short, long = [1.0 + at for at in range(6)], [20.0] * 6
    rope = {"type": kind, "short_factor": short, "long_factor": long}
    config = parse(
        "phi3",
        rope_parameters=ABSENT,
        rope_theta=1e4,
        rope_scaling=rope,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=64,
    )
    assert config.max_context == 64
    assert rope_of(config).frequency_divisors == tuple(short)
    assert rope_of(config).rotary_dim == 12
    assert rope_of(config).attention_factor == pytest.approx(1.224745, rel=1e-6)


def test_thetas_of_gemma_3_may_stand_beside_its_two_rotations() -> None:
    rotations = {"full_attention": {"rope_type": "default"}, "sliding_attention": None}
    config = parse("gemma3", rope_parameters=rotations, rope_theta=5e5, rope_local_base_freq=300.0)
    assert [kind.rope.theta for kind in config.layer_kinds if kind.rope] == [300.0, 300.0, 5e5, 300.0]


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "vocab_size": 320,
}
"""What every file states."""


@pytest.mark.parametrize(
    ("family", "context", "kv_heads", "head_dim", "eps", "window", "tied"),
    [
        ("llama", 2048, 32, 2, 1e-6, None, False),
        ("arcee", 4096, 32, 2, 1e-5, None, False),
        ("mistral", 131072, 8, 2, 1e-6, 4096, False),
        ("mixtral", 131072, 8, 2, 1e-5, None, False),
        ("qwen2", 32768, 32, 2, 1e-6, None, False),
        ("qwen3", 32768, 32, 128, 1e-6, None, False),
        ("qwen3_moe", 32768, 4, 2, 1e-6, None, False),
        ("gemma2", 8192, 4, 256, 1e-6, 4096, True),
        ("gemma3_text", 131072, 4, 256, 1e-6, 4096, True),
        ("phi3", 4096, 32, 2, 1e-5, None, False),
        ("olmo2", 2048, 32, 2, 1e-5, None, False),
        ("granite", 2048, 32, 2, 1e-6, None, False),
        ("smollm3", 32768, 4, 2, 1e-6, None, True),
    ],
)
def test_fields_that_a_file_leaves_out_are_what_the_family_says(
    family: str, context: int, kv_heads: int, head_dim: int, eps: float, window: int | None, tied: bool
) -> None:
    config = family_of(family, "config.json").read_config({"model_type": family, **SIZES})
    assert (config.max_context, config.num_kv_heads, config.head_dim) == (context, kv_heads, head_dim)
    assert (config.norm_eps, config.windows[0], config.tied_embeddings) == (eps, window, tied)


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no window for it"),
        ("qwen2", {"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "scale": 3}}, "scale=3"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "chooses 5 of 4 experts"),
        ("mixtral", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8"),
        ("mistral_window", {"sliding_window": 0}, "smallest window is 0"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "no objects full_attention and"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3", {"sliding_window_pattern": 0, "layer_types": ABSENT}, "sliding_window_pattern=0"),
        ("phi3", {"attention_bias": True}, "attention_bias=True"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8}}, "no short_factor"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "7 frequency factors",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": ["x"] * 8}},
            "long_factor that is no list of numbers",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "24 of 16"),
        ("olmo2", {"sliding_window": 8}, "sliding_window=8"),
        ("granite", {"logits_scaling": 0.0}, "logit_divisor is 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
    ],
)
def test_what_a_family_does_not_implement_is_refused_by_name(case: str, changes: dict, named: str) -> None:
    with pytest.raises(JaxkvError) as refusal:
        parse(case, **changes)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def rope_with(case: str, layout: str, **extra: Any) -> dict[str, Any]:
    """The fields of a golden case that say how it rotates, with more in them."""
    fields = json.loads((GOLDEN / case / layout).read_text())
    if layout == "config_legacy.json":
        return fields | {"rope_scaling": (fields.get("rope_scaling") or {"rope_type": "default"}) | extra}
    ropes = fields["rope_parameters"]
    nested = {name: rope | extra for name, rope in ropes.items()} if "full_attention" in ropes else ropes | extra
    return fields | {"rope_parameters": nested}


@pytest.mark.parametrize("layout", ["config.json", "config_legacy.json"])
@pytest.mark.parametrize("case", ALL_CASES)
def test_a_field_that_nobody_knows_is_refused_by_name_in_every_family(case: str, layout: str) -> None:
    stated = json.loads((GOLDEN / case / layout).read_text())
    family = family_of(stated["model_type"], "config.json")
    family.read_config(stated)
    for fields, named in (
        (stated | {"surprise_norm": 2}, "sets surprise_norm=2"),
        (stated | {"is_causal": False}, "is_causal=False"),
        (stated | {"hidden_act": "relu"}, "hidden_act='relu'"),
        (rope_with(case, layout, surprise_scale=2), "sets surprise_scale=2"),
        (rope_with(case, layout, rope_type="spiral"), "RoPE type 'spiral'"),
    ):
        with pytest.raises(JaxkvError) as refusal:
            family.read_config(fields)
        assert named in str(refusal.value)
        assert "\n" not in str(refusal.value)
