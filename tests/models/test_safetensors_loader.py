"""Model directories: one file or shards, three storage types, every defect one line that names the tensor or file."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from model_files import copy_case, read_tensors, write_shards
from safetensors.numpy import load_file, save_file

from kv_common.errors import JaxkvError
from models import CheckpointError, load_model
from models.safetensors_loader import SafetensorsCheckpoint

Tensors = dict[str, np.ndarray]


def refusal_of(directory: Path) -> str:
    with pytest.raises(JaxkvError) as refusal:
        load_model(directory)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_shards_hold_the_same_model_as_one_file(golden: Path, tmp_path: Path) -> None:
    sharded = load_model(write_shards(golden / "llama", tmp_path))
    assert sharded.fingerprint == load_model(golden / "llama").fingerprint


def test_a_missing_shard_is_named(golden: Path, tmp_path: Path) -> None:
    (write_shards(golden / "llama", tmp_path) / "model-00002-of-00003.safetensors").unlink()
    assert "lacks the shard model-00002-of-00003.safetensors (1 of 3 missing)" in refusal_of(tmp_path)


def test_a_shard_without_a_tensor_that_the_index_places_there_is_named(golden: Path, tmp_path: Path) -> None:
    write_shards(golden / "llama", tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.phantom.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    assert "model-00001-of-00003.safetensors lacks model.phantom.weight" in refusal_of(tmp_path)


def test_of_two_copies_the_one_in_the_shard_that_the_index_names_is_read(golden: Path, tmp_path: Path) -> None:
    write_shards(golden / "llama", tmp_path)
    first, second, third = (tmp_path / f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    tensors = load_file(second)
    for other in (first, third):
        tensors |= {next(iter(load_file(other))): np.zeros(3, np.float32)}
    save_file(tensors, second)
    assert load_model(tmp_path).fingerprint == load_model(golden / "llama").fingerprint


@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_load_as_the_values_they_hold(golden: Path, tmp_path: Path, storage: type) -> None:
    def narrow(tensors: Tensors) -> Tensors:
        return {name: tensor.astype(storage) for name, tensor in tensors.items()}

    model = load_model(copy_case(golden / "llama", tmp_path, tensors=narrow))
    original = read_tensors(golden / "llama")["model.layers.1.mlp.up_proj.weight"]
    loaded = np.asarray(model.params["layers"]["mlp"]["up"]["weight"].values)[1]
    assert loaded.dtype == storage
    np.testing.assert_array_equal(loaded, original.astype(storage))
    assert model.params["norm"]["weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("stored", "dtype", "held"),
    [
        ("bfloat16", "float16", "float16"),
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float16 and float32", "float32", "float32"),
        ("float16 and bfloat16", "float32", "float32"),
    ],
)
def test_other_dense_weights_are_cast(golden: Path, tmp_path: Path, stored: str, dtype: str, held: str) -> None:
    first, last = np.dtype(stored.split(" and ")[0]), np.dtype(stored.split(" and ")[-1])

    def narrow(tensors: Tensors) -> Tensors:
        return {name: tensor.astype(last if ".layers.1." in name else first) for name, tensor in tensors.items()}

    model = load_model(copy_case(golden / "llama", tmp_path, tensors=narrow), dtype=dtype)
    original = read_tensors(tmp_path)["model.layers.1.mlp.up_proj.weight"]
    loaded = np.asarray(model.params["layers"]["mlp"]["up"]["weight"].values)
    assert loaded.dtype == held
    np.testing.assert_array_equal(loaded[1], original.astype(np.float32).astype(held))


def write_header(path: Path, header: bytes) -> None:
    """A safetensors file of this header and 64 bytes of data."""
    path.chmod(0o644)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight:"),
        (lambda tensors: {}, "lacks lm_head.weight and 20 more"),
        (lambda tensors: tensors | {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}, "q_norm"),
        (
            lambda tensors: tensors | {"model.layers.2.mlp.up_proj.weight": np.ones((128, 64), np.float32)},
            "layers.2.mlp",
        ),
        (lambda tensors: tensors | {"model.norm.weight": np.ones(32, np.float32)}, "model.norm.weight has shape [32]"),
        (
            lambda tensors: tensors | {"model.layers.1.self_attn.k_proj.weight": np.ones((64, 32), np.float32)},
            "model.layers.1.self_attn.k_proj.weight has shape [64, 32], the configuration calls for [32, 64]",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(golden: Path, tmp_path: Path, change, named: str) -> None:
    assert named in refusal_of(copy_case(golden / "llama", tmp_path, tensors=change))


def bare(tensors: Tensors) -> Tensors:
    """As AutoModel saves a model: what is below the output matrix."""
    return {name.removeprefix("model."): each for name, each in tensors.items() if name != "lm_head.weight"}


def test_names_without_model_are_those_of_the_network_below_the_output_matrix(golden: Path, tmp_path: Path) -> None:
    tied = copy_case(golden / "llama_bias_tied", tmp_path / "tied", tensors=bare)
    assert load_model(tied).fingerprint == load_model(golden / "llama_bias_tied").fingerprint
    lacking = copy_case(
        golden / "llama", tmp_path / "lacking", tensors=lambda tensors: without("norm.weight")(bare(tensors))
    )
    assert "lacks lm_head.weight and 1 more" in refusal_of(lacking)


def test_a_model_without_an_output_matrix_has_no_logits(golden: Path, tmp_path: Path) -> None:
    path = copy_case(golden / "llama", tmp_path, tensors=bare, config={"architectures": ["LlamaModel"]})
    model, whole = load_model(path), load_model(golden / "llama")
    assert (model.spec.num_labels, whole.spec.num_labels) == (0, None)
    assert model.params.keys() == whole.params.keys() - {"output"}


def test_stored_inverse_frequencies_are_tolerated(golden: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    load_model(copy_case(golden / "llama", tmp_path, tensors=lambda tensors: tensors | extra))


def test_a_stored_copy_of_a_tied_output_matrix_is_dropped_and_a_different_one_refused(
    golden: Path, tmp_path: Path
) -> None:
    def with_output(scale: float) -> Callable[[Tensors], Tensors]:
        return lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * np.float32(scale)}

    case = golden / "llama_bias_tied"
    copied = load_model(copy_case(case, tmp_path / "same", tensors=with_output(1)))
    assert copied.fingerprint == load_model(case).fingerprint
    message = refusal_of(copy_case(case, tmp_path / "other", tensors=with_output(2)))
    assert "lm_head.weight differs from model.embed_tokens.weight though tie_word_embeddings is true" in message


def test_values_that_float16_cannot_hold_are_named(golden: Path, tmp_path: Path) -> None:
    def enlarge(tensors: Tensors) -> Tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
        return tensors

    directory = copy_case(golden / "llama", tmp_path, tensors=enlarge)
    with pytest.raises(CheckpointError, match=r"up_proj.weight has values beyond float16's 65504"):
        load_model(directory, dtype="float16")
    load_model(directory, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_infinite_in_the_file_is_no_matter_of_the_dtype(golden: Path, tmp_path: Path, dtype: str) -> None:
    def narrow(tensors: Tensors) -> Tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
        return {name: tensor.astype(np.float16) for name, tensor in tensors.items()}

    model = load_model(copy_case(golden / "llama", tmp_path, tensors=narrow), dtype=dtype)
    assert np.isinf(np.asarray(model.params["layers"]["mlp"]["up"]["weight"].values)[1, 3, 4])


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 3000, 400000])
def test_a_file_cut_short_is_one_line(golden: Path, tmp_path: Path, kept: int) -> None:
    path = copy_case(golden / "llama", tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:kept])
    message = refusal_of(tmp_path)
    assert f"{path} is not a safetensors file, or is damaged or cut short ({kept} bytes; " in message
    assert message.endswith("get it again")


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"dtype": "I8", "shape": [64], "data_offsets": [0, 64]}, "x is stored as I8, implemented are F32, F16, BF16"),
        ({"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}, "x is stored as F8_E4M3, implemented are"),
        ({"dtype": "Q9", "shape": [64], "data_offsets": [0, 64]}, "Q9"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 64]}, "damaged or cut short"),
        ({"dtype": "F32", "data_offsets": [0, 64]}, "missing field `shape`"),
        ([], "damaged or cut short"),
    ],
)
def test_a_damaged_header_is_one_line(golden: Path, tmp_path: Path, field: object, named: str) -> None:
    copy_case(golden / "llama", tmp_path)
    write_header(tmp_path / "model.safetensors", json.dumps({"x": field}).encode())
    assert named in refusal_of(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"not json", b'{"x": 1', b"\xff\xfe"])
def test_a_header_that_is_no_object_is_one_line(golden: Path, tmp_path: Path, header: bytes) -> None:
    copy_case(golden / "llama", tmp_path)
    write_header(tmp_path / "model.safetensors", header)
    assert "damaged or cut short" in refusal_of(tmp_path)


def test_a_tensor_name_that_no_message_can_repeat_is_one_line(golden: Path, tmp_path: Path) -> None:
    extra = {"two\nlines": np.ones(1, np.float32)}
    message = refusal_of(copy_case(golden / "llama", tmp_path, tensors=lambda tensors: tensors | extra))
    assert "damaged (the name 'two\\nlines')" in message


def test_a_checkpoint_holds_no_tensor_in_memory_but_those_it_has_read(tmp_path: Path) -> None:
    size = 4 << 20
    save_file({name: np.ones(size // 4, np.float32) for name in "abcd"}, tmp_path / "model.safetensors")
    SafetensorsCheckpoint(tmp_path)  # the first use imports
    tracemalloc.start()
    try:
        checkpoint = SafetensorsCheckpoint(tmp_path)
        assert {checkpoint.shape(name) for name in checkpoint.names} == {(size // 4,)}
        assert tracemalloc.get_traced_memory()[1] < size // 16
        for name in checkpoint.names:
            assert checkpoint.read(name).sum() == size // 4
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()


def test_a_directory_without_safetensors_says_what_to_do(golden: Path, tmp_path: Path) -> None:
    (copy_case(golden / "llama", tmp_path) / "model.safetensors").unlink()
    assert "convert the weights to safetensors" in refusal_of(tmp_path)
    for name in ("a", "b"):
        save_file(read_tensors(golden / "llama"), tmp_path / f"{name}.safetensors")
    assert "2 safetensors files and no model.safetensors.index.json" in refusal_of(tmp_path)
