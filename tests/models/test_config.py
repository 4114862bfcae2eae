"""A configuration is understood whole or refused by name, in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from kv_common.errors import JaxkvError
from models.config import DecoderConfig, LayerKind, ModelConfigError, RopeConfig, UnsupportedModelError
from models.config_fields import ConfigFields, read_json
from models.families import family_of
from models.families.llama import FAMILY


def parse(golden: Path, **changes: Any) -> DecoderConfig:
    fields = json.loads((golden / "llama" / "config.json").read_text()) | changes
    fields = {name: value for name, value in fields.items() if value != "absent"}
    return FAMILY.hf_config(ConfigFields(fields, "config.json"))


def test_every_size_is_read(golden: Path) -> None:
    assert parse(golden) == DecoderConfig(
        architecture="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_context=512,
        norm_eps=1e-5,
        layer_kinds=(LayerKind(rope=RopeConfig(theta=10000.0)),) * 2,
    )


def test_what_a_config_leaves_out_has_its_documented_default(golden: Path) -> None:
    config = parse(golden, head_dim=None, num_key_value_heads="absent", rope_parameters="absent", rms_norm_eps="absent")
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (16, 4, 1e-6)
    assert config.layer_kinds[0].rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"a_field_from_the_future": 0}, "a_field_from_the_future=0"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 4.0}}, "'proportional'"),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "mrope", "mrope_section": [2]}}, "'mrope'"),
        ({"rope_scaling": {"type": "foo"}}, "rope_scaling has RoPE type 'foo'"),
        ({"rope_parameters": {"rope_type": "foo"}, "rope_scaling": {"type": "linear"}}, "has RoPE type 'foo'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.5}}, "mscale=1.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(golden: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        parse(golden, **changes)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "absent"}, "has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size='64', expected int"),
        ({"attention_bias": 1}, "attention_bias=1, expected bool"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True, expected int"),
        ({"num_attention_heads": 0}, "0 heads"),
        ({"num_attention_heads": 5, "head_dim": None}, "does not divide into 5 heads"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide into 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": -1.0}, "epsilon is -1"),
        ({"rope_theta": 5000.0}, "two values of rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "and rope_scaling={'type': 'linear', 'factor': 2.0}"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "factor is 0"),
    ],
)
def test_what_contradicts_itself_is_named(golden: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError) as refusal:
        parse(golden, **changes)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_fields_that_change_nothing_and_fields_switched_off_are_accepted(golden: Path) -> None:
    harmless = {
        "attention_dropout": 0.1,
        "use_cache": False,
        "transformers_version": "4.30",
        "pad_token_id": 3,
        "unk_token_id": 0,
    }
    off = {"sliding_window": None, "rope_interleaved": False, "pruned_heads": {}}
    assert parse(golden, **harmless, **off) == parse(golden)


def test_linear_scaling_is_read_in_either_layout(golden: Path) -> None:
    new = parse(golden, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
    old = parse(golden, rope_parameters="absent", rope_theta=10000, rope_scaling={"type": "linear", "factor": 4})
    assert new == old
    assert new.layer_kinds[0].rope == RopeConfig(theta=10000.0, kind="linear", factor=4.0)


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba', implemented are arcee, .*, smollm3: use one of those"):
        family_of("mamba", "config.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_file_that_is_no_json_object_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(JaxkvError, match=r"get the file again$") as refusal:
        read_json(path)
    assert "\n" not in str(refusal.value)


def test_a_number_of_layers_beyond_reason_is_refused_before_anything_is_made_for_them() -> None:
    with pytest.raises(ModelConfigError, match="num_layers is 2147483647, at most 4096"):
        DecoderConfig("llama", 10, 8, 16, 2**31 - 1, 2, 1, 4, 64, 1e-5)
