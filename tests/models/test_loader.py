"""`load_model` takes a directory, a file or a hub id, and what it cannot have is one line."""

import json
import logging
import socket
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from model_files import copy_case, read_tensors, tiny_vocabulary, write_gguf

from kv_common.errors import JaxkvError
from models import CheckpointError, GenerationDefaults, ModelConfigError, UnsupportedModelError, load_model


def test_the_spec_counts_parameters_and_bytes(golden: Path) -> None:
    spec = load_model(golden / "llama").spec
    numbers = sum(tensor.size for tensor in read_tensors(golden / "llama").values())
    assert (spec.num_parameters, spec.parameter_bytes) == (numbers, 4 * numbers)
    assert (spec.name, spec.architecture, spec.dtype, spec.max_context) == ("llama", "llama", "float32", 512)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert spec.eos_token_ids == (2,)


def test_progress_reaches_the_number_of_parameters_and_never_falls(golden: Path) -> None:
    seen = []
    model = load_model(golden / "llama", progress=seen.append)
    assert [each.done for each in seen] == sorted({each.done for each in seen})
    assert seen[-1].done == seen[-1].total == model.spec.num_parameters
    assert "layers.attention.q.weight" in {each.parameter for each in seen}


def test_the_fingerprint_changes_with_any_weight_the_config_and_the_dtype(golden: Path, tmp_path: Path) -> None:
    def nudge(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1e-6
        return tensors

    def scaled(path: Path) -> Path:
        return copy_case(golden / "llama", path, config={"rms_norm_eps": 1e-6})

    prints = [
        load_model(golden / "llama").fingerprint,
        load_model(golden / "llama", dtype="bfloat16").fingerprint,
        load_model(copy_case(golden / "llama", tmp_path / "nudged", tensors=nudge)).fingerprint,
        load_model(scaled(tmp_path / "scaled")).fingerprint,
    ]
    assert len(set(prints)) == 4
    assert {len(each) for each in prints} == {32}
    assert load_model(copy_case(golden / "llama", tmp_path / "copy")).fingerprint == prints[0]


def test_a_gguf_brings_its_tokenizer_template_and_end_tokens(golden: Path, tmp_path: Path) -> None:
    extra = {"tokenizer.chat_template": "hello", "tokenizer.ggml.eot_token_id": 7}
    model = load_model(write_gguf(golden / "llama", tmp_path / "tiny.gguf", metadata=extra))
    assert model.tokenizer is not None
    assert model.tokenizer.vocab_size == 320
    assert model.chat_template is not None
    assert model.chat_template.render([]) == "hello"
    assert model.spec.eos_token_ids == model.generation.eos_token_ids == (0, 7)
    assert model.spec.name == "tiny"


def test_sampling_defaults_count_where_the_checkpoint_samples(golden: Path, tmp_path: Path) -> None:
    assert load_model(golden / "llama").generation == GenerationDefaults(eos_token_ids=(2,))
    path = copy_case(golden / "llama", tmp_path) / "generation_config.json"
    path.chmod(0o644)
    asked = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [5, 6]}
    path.write_text(json.dumps(asked))
    assert load_model(tmp_path).generation == GenerationDefaults((5, 6), 0.6, 20, 0.9)
    path.write_text(json.dumps(asked | {"do_sample": False}))
    assert load_model(tmp_path).generation == GenerationDefaults((5, 6))
    path.unlink()
    assert load_model(tmp_path).generation == GenerationDefaults((2,))  # config.json's
    path.write_text(json.dumps({"do_sample": True, "temperature": "hot"}))
    with pytest.raises(ModelConfigError, match="temperature='hot', expected float"):
        load_model(tmp_path)
    for name, value in {"temperature": -3, "top_k": -1, "top_p": 1.5, "min_p": 2, "repetition_penalty": 0}.items():
        path.write_text(json.dumps({"do_sample": True, name: value}))
        with pytest.raises(ModelConfigError, match=rf"generation_config.json has {name}={value}.*, expected "):
            load_model(tmp_path)
    path.write_text(json.dumps({"eos_token_id": [2, "</s>"]}))
    with pytest.raises(ModelConfigError, match=r"eos_token_id=.* expected token ids"):
        load_model(tmp_path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(golden: Path, tmp_path: Path) -> None:
    path = write_gguf(golden / "llama", tmp_path / "model.gguf", metadata=tiny_vocabulary(330))
    with pytest.raises(ModelConfigError, match="the tokenizer has 330 tokens, the model embeds 320"):
        load_model(path)


def test_added_tokens_beyond_the_embedding_are_told_and_not_refused(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy_case(golden / "gemma3", tmp_path)
    words = {f"w{index}": index for index in range(320)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.add_special_tokens(["<image>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        assert load_model(tmp_path).spec.vocab_size == 320
    assert "does not embed 1 of the tokens that were added" in caplog.text


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba'"),
        (
            {"architectures": ["LlamaForTokenClassification"]},
            "architectures='LlamaForTokenClassification' where model_type is 'llama', implemented there is Llama",
        ),
        ({"architectures": ["Mistral\nForCausalLM"]}, r"architectures='Mistral\\nForCausalLM' where model_type is"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(golden: Path, tmp_path: Path, config: dict, named: str) -> None:
    with pytest.raises(JaxkvError, match=named) as refusal:
        load_model(copy_case(golden / "llama", tmp_path, config=config))
    assert "\n" not in str(refusal.value)


PATHS = [
    "absent.gguf",
    "models/absent.gguf",
    "models/absent.safetensors",
    "/absent/model",
    "./absent",
    "../absent",
    "~/absent",
    "~nobody-of-this-name/absent",
    "a/b/c",
    "absent",
    "owner/",
    "x" * 5000,
    Path("owner/name"),
]


@pytest.mark.parametrize("source", PATHS, ids=lambda source: str(source)[:30])
def test_a_path_that_does_not_exist_is_one_line_and_never_looked_up(
    source: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="no such file or directory: give a model directory") as refusal:
        load_model(source)
    assert str(source) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_directory_without_a_model_says_what_to_give(tmp_path: Path, golden: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"has no config\.json: give a model directory or a \.gguf file"):
        load_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelConfigError, match=r"has no config\.json: give a model directory or a \.gguf file"):
        load_model(tmp_path)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelConfigError, match=r"has no config\.json: give .*/small\.gguf"):
        load_model(tmp_path)


def test_a_file_of_weights_alone_asks_for_its_directory(golden: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors holds weights alone: give the directory"):
        load_model(golden / "llama" / "model.safetensors")


def test_a_hub_id_without_a_network_is_one_line_and_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = []

    def no_network(host: str, *_: object, **__: object) -> None:
        lookups.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(CheckpointError, match=r"^no-owner/no-model is not a path and cannot be downloaded") as refusal:
        load_model("no-owner/no-model")
    assert "\n" not in str(refusal.value)
    assert len(lookups) <= 2  # what the library itself does without waiting


def test_an_unknown_compute_dtype_is_refused(golden: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'int3' is not implemented: use float32, bfloat16, float16"):
        load_model(golden / "llama", dtype="int3")


def test_a_hub_id_is_downloaded_and_a_failure_is_one_line(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def give(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(golden / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    assert load_model("owner/name").spec.name == "owner/name"
    assert asked == [("owner/name", ["*.json", "*.safetensors", "*.jinja"])]

    def fail(repo_id: str, allow_patterns: list[str]) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no route to host\nmore detail")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"cannot be downloaded \(no route to host\)") as refusal:
        load_model("owner/name")
    assert "\n" not in str(refusal.value)
