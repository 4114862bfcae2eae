"""Adapters of PEFT: what is read, and what is refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from lora_files import PREFIX, write_adapter, write_merged
from model_files import read_tensors
from safetensors.numpy import load_file, save_file

from kv_common.errors import JaxkvError
from models import load_model
from models.lora import read_adapter


@pytest.fixture(scope="module")
def case(golden: Path) -> Path:
    return golden / "llama"


@pytest.fixture(scope="module")
def decoder(case):
    return load_model(case).decoder


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 6}, {"q_proj": 1.5, "o_proj": 1.5}),
        ({"lora_alpha": 6, "use_rslora": True}, {"q_proj": 3.0, "o_proj": 3.0}),
        (
            {"lora_alpha": 6, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"self_attn.q_proj": 1}},
            {"q_proj": 0.25, "o_proj": 3.0},
        ),
        ({"lora_alpha": 1, "use_rslora": True, "rank_pattern": {"o_proj": 2}}, {"q_proj": 0.5, "o_proj": 2**-0.5}),
    ],
)
def test_the_scale_is_what_peft_makes_of_alpha_and_rank(case, decoder, config, scales, tmp_path):
    path = write_adapter(tmp_path / "adapter", case, ("q_proj", "o_proj"), **config)
    adapter = read_adapter(path, decoder)
    merged = read_tensors(write_merged(tmp_path / "merged", case, path, scales))
    before = read_tensors(case)
    assert sorted(adapter.pairs) == ["layers.attention.o", "layers.attention.q"]
    for short in "qo":
        pair = adapter.pairs[f"layers.attention.{short}"]
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.{short}_proj.weight"
            np.testing.assert_allclose(pair.out[layer] @ pair.into[layer], merged[name] - before[name], atol=1e-5)


def test_layers_that_an_adapter_lacks_are_zero(case, decoder, tmp_path):
    path = write_adapter(tmp_path, case, ("1.self_attn.v_proj",), layers_to_transform=[1])
    pair = read_adapter(path, decoder).pairs["layers.attention.v"]
    assert not pair.into[0].any()
    assert not pair.out[0].any()
    assert pair.out[1].any()


def test_the_fingerprint_is_of_what_is_computed(case, decoder, tmp_path):
    def fingerprint(name: str, **settings) -> bytes:
        return read_adapter(write_adapter(tmp_path / name, case, ("q_proj",), **settings), decoder).fingerprint

    assert fingerprint("a") == fingerprint("b", base_model_name_or_path="elsewhere", lora_dropout=0.5)
    assert len({fingerprint("a"), fingerprint("c", seed=1), fingerprint("d", lora_alpha=3)}) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "sets use_dora=True, which is not implemented"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save="),
        ({"bias": "lora_only"}, "bias='lora_only', implemented is 'none'"),
        ({"peft_type": "IA3"}, "peft_type='IA3', implemented is 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', implemented is True or False or 'gaussian'"),
        ({"layer_replication": [[0, 2]]}, "sets layer_replication="),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True, implemented is False"),
        ({"lora_bias": True}, "sets lora_bias=True"),
        ({"r": 3}, r"lora_A \[4, 64\] and lora_B \[64, 4\], adapter_config.json calls for rank 3"),
        ({"r": 0}, r"has ranks \(0,\), which are not all whole numbers"),
        ({"alpha_pattern": {"q_proj": "2"}}, "which are not all numbers"),
    ],
)
def test_what_changes_the_arithmetic_and_is_not_implemented_is_refused(case, decoder, config, message, tmp_path):
    path = write_adapter(tmp_path, case, ("q_proj",))
    fields = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(fields | config))
    with pytest.raises(JaxkvError, match=message) as error:
        read_adapter(path, decoder)
    assert "\n" not in str(error.value)


def changed(tensors: dict[str, np.ndarray], name: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    return {key: each for key, each in (tensors | {name: value}).items() if each is not None}


QUERY = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{QUERY}.lora_A.weight", None, "has half of model.layers.0.self_attn.q_proj"),
        (f"{QUERY}.lora_A.weight", np.zeros((4, 63), "f4"), "maps 63 features to 64, the model's maps 64 to 64"),
        (f"{QUERY}.lora_B.weight", np.zeros((65, 4), "f4"), "maps 64 features to 65, the model's maps 64 to 64"),
        (f"{QUERY}.lora_magnitude_vector", np.zeros(64, "f4"), "has .*q_proj.lora_magnitude_vector, implemented are"),
        (f"{PREFIX}lm_head.weight", np.zeros((2, 2), "f4"), "has .*lm_head.weight, implemented are lora_A and lora_B"),
        (
            f"{PREFIX}model.embed_tokens.lora_embedding_A",
            np.zeros((4, 320), "f4"),
            "has .*embed_tokens.lora_embedding_A",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(case, decoder, name, value, message, tmp_path):
    path = write_adapter(tmp_path, case, ("q_proj",))
    tensors = load_file(path / "adapter_model.safetensors")
    save_file(changed(tensors, name, value), path / "adapter_model.safetensors")
    with pytest.raises(JaxkvError, match=message):
        read_adapter(path, decoder)


@pytest.mark.parametrize(
    ("dtype", "number", "config"),
    [
        ("float32", np.nan, {}),
        ("float32", np.inf, {}),
        ("float32", 1.0, {"lora_alpha": float("nan")}),
        ("float32", 1e30, {"lora_alpha": 1e20}),
        ("float16", 3e5, {}),
    ],
)
def test_numbers_that_would_spoil_other_requests_are_refused(case, dtype, number, config, tmp_path):
    path = write_adapter(tmp_path, case, ("q_proj",), **config)
    tensors = load_file(path / "adapter_model.safetensors")
    name = sorted(each for each in tensors if "lora_B" in each)[0]
    tensors[name][0, 0] = number
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(JaxkvError, match=rf"q_proj has a number of size (nan|inf|.*e).*, and {dtype} ends at"):
        read_adapter(path, load_model(case, dtype=dtype).decoder)


def test_a_pattern_that_is_none_is_named(case, decoder, tmp_path):
    path = write_adapter(tmp_path, case, ("q_proj",), alpha_pattern={"(": 4})
    with pytest.raises(JaxkvError, match=r"has the pattern '\(', which is none"):
        read_adapter(path, decoder)


@pytest.mark.parametrize("module", ["lm_head", "model.layers.2.self_attn.q_proj", "model.layers.0.mlp.experts.0.up"])
def test_a_module_that_the_model_lacks_is_named(case, decoder, module, tmp_path):
    pair = {"A": np.zeros((4, 64), "f4"), "B": np.zeros((64, 4), "f4")}
    extra = {f"{PREFIX}{module}.lora_{side}.weight": value for side, value in pair.items()}
    path = write_adapter(tmp_path, case, ("q_proj",), extra=extra)
    with pytest.raises(JaxkvError, match=f"adapts {module}, which is no projection of attention or MLP"):
        read_adapter(path, decoder)


@pytest.mark.parametrize("module", ["gate", "experts.1.w2"])
def test_a_router_and_an_expert_are_not_adapted(golden, module, tmp_path):
    pair = {"A": np.zeros((4, 64), "f4"), "B": np.zeros((64, 4), "f4")}
    name = f"model.layers.0.block_sparse_moe.{module}"
    extra = {f"{PREFIX}{name}.lora_{side}.weight": value for side, value in pair.items()}
    path = write_adapter(tmp_path, golden / "mixtral", ("q_proj",), extra=extra)
    with pytest.raises(JaxkvError, match=f"adapts {name}, which is no projection of attention or MLP"):
        load_model(golden / "mixtral").read_adapter(path)


def test_an_adapter_of_what_is_below_the_output_matrix_is_the_same(case, decoder, tmp_path):
    path = write_adapter(tmp_path / "whole", case, ("q_proj", "down_proj"))
    tensors = load_file(path / "adapter_model.safetensors")
    bare = shutil.copytree(path, tmp_path / "bare")
    save_file(
        {name.replace(f"{PREFIX}model.", PREFIX): each for name, each in tensors.items()},
        bare / "adapter_model.safetensors",
    )
    assert read_adapter(bare, decoder).fingerprint == read_adapter(path, decoder).fingerprint


def test_a_directory_that_is_no_adapter_is_refused(case, decoder, tmp_path):
    with pytest.raises(JaxkvError, match=r"has no adapter_config.json: give the directory of a PEFT LoRA adapter"):
        read_adapter(case, decoder)
    path = write_adapter(tmp_path, case, ("q_proj",))
    save_file({}, path / "adapter_model.safetensors")
    with pytest.raises(JaxkvError, match="has no tensors"):
        read_adapter(path, decoder)
