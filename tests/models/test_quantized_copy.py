"""Quantized copies: ggml's rounding bit for bit, files that this loader and the gguf package read, nothing replaced."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import copy_case, read_tensors, write_gguf

from kv_common.errors import JaxkvError
from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, DenseWeight
from models import LoadProgress, load_model
from models.assembly import by_path
from models.block_quantizer import KINDS, pack_rows, round_rows
from models.gguf_blocks import join_blocks
from models.quantized_copy import DIRECTORY_KINDS, quantize_checkpoint


def values_of(model) -> dict[str, np.ndarray]:
    return {
        path: np.asarray(dequantize(leaf, jnp.float32) if isinstance(leaf, BlockQuantWeight | DenseWeight) else leaf)
        for path, leaf in by_path(model.params).items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_equals_the_gguf_package_bit_for_bit(kind: str) -> None:
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((7, 96)) * 2.0 ** rng.integers(-12, 5, (7, 96))).astype(np.float32)
    values[0, :32], values[1, 32:64] = 0, 0.25
    got = join_blocks(pack_rows(round_rows(values, kind), kind))
    np.testing.assert_array_equal(got, gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["F32", "BF16"])
def test_a_copy_of_a_gguf_is_the_file_that_the_gguf_package_would_make(
    golden: Path, tmp_path: Path, kind: str, storage: str
) -> None:
    source = write_gguf(golden / "llama", tmp_path / "model.gguf", storage=lambda name: storage)
    report = quantize_checkpoint(source, tmp_path / "copy.gguf", kind)
    assert report.rounded == 16
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "copy.gguf")
    assert after.fields.keys() - before.fields.keys() == {"general.file_type", "general.quantization_version"}
    for name, field in before.fields.items():
        if not name.startswith("GGUF."):
            assert after.fields[name].contents() == field.contents(), name
    assert sum(tensor.n_bytes for tensor in after.tensors) == report.bytes_after < report.bytes_before
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (new.name, new.shape.tolist()) == (old.name, old.shape.tolist())
        if len(old.shape) == 1:
            np.testing.assert_array_equal(new.data, old.data)
            continue
        end = old.name in ("token_embd.weight", "output.weight")
        assert new.tensor_type.name == ("Q8_0" if end else kind.upper())
        dense = gguf.quants.dequantize(old.data, old.tensor_type)
        np.testing.assert_array_equal(new.data, gguf.quants.quantize(dense, new.tensor_type))
    assert load_model(tmp_path / "copy.gguf").spec.num_layers == 2


@pytest.mark.parametrize("kind", DIRECTORY_KINDS)
def test_a_copy_of_a_directory_has_the_same_values_as_that_of_a_gguf(golden: Path, tmp_path: Path, kind: str) -> None:
    report = quantize_checkpoint(golden / "llama", tmp_path / "copy", kind)
    assert report.rounded == 14
    quantize_checkpoint(write_gguf(golden / "llama", tmp_path / "model.gguf"), tmp_path / "copy.gguf", kind)
    ours, theirs = (values_of(load_model(tmp_path / name)) for name in ("copy", "copy.gguf"))
    dense = values_of(load_model(golden / "llama"))
    for path, values in ours.items():
        expected = dense[path] if path in ("embedding.weight", "output.weight") else theirs[path]
        np.testing.assert_array_equal(values, expected, err_msg=path)
    assert (tmp_path / "copy" / "generation_config.json").read_text() == (
        golden / "llama" / "generation_config.json"
    ).read_text()


def test_experts_are_rounded_and_their_router_is_not(golden: Path, tmp_path: Path) -> None:
    quantize_checkpoint(golden / "mixtral", tmp_path / "copy", "q8_0")
    mlp = load_model(tmp_path / "copy").params["layers"]["mlp"]
    assert isinstance(mlp["router"]["weight"], DenseWeight)
    assert isinstance(mlp["expert_up"]["weight"], BlockQuantWeight)


def test_progress_ends_at_every_byte(golden: Path, tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    report = quantize_checkpoint(golden / "llama", tmp_path / "copy", "q4_0", progress=seen.append)
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    assert seen[-1].done == seen[-1].total == report.bytes_after


def refusal_of(source: Path, target: Path, kind: str = "q8_0", *, overwrite: bool = False) -> str:
    with pytest.raises(JaxkvError) as refusal:
        quantize_checkpoint(source, target, kind, overwrite=overwrite)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_nothing_is_replaced_unasked_and_a_directory_never(golden: Path, tmp_path: Path) -> None:
    source = write_gguf(golden / "llama", tmp_path / "model.gguf")
    target = tmp_path / "copy.gguf"
    target.write_text("mine")
    assert refusal_of(source, target).endswith("give a target that does not, or --force to replace it")
    assert target.read_text() == "mine"
    assert refusal_of(source, source, overwrite=True).endswith("exists: give a target that does not")
    (tmp_path / "folder").mkdir()
    assert "folder exists" in refusal_of(golden / "llama", tmp_path / "folder", overwrite=True)
    quantize_checkpoint(source, target, "q8_0", overwrite=True)
    assert load_model(target).spec.num_layers == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.gguf", "folder", "model.gguf"]


def test_what_cannot_be_rounded_is_refused_and_leaves_nothing_behind(golden: Path, tmp_path: Path) -> None:
    quantized = write_gguf(golden / "llama", tmp_path / "model.gguf", storage=lambda name: "Q8_0")
    assert "is Q8_0 already" in refusal_of(quantized, tmp_path / "copy.gguf")
    assert "no such file" in refusal_of(tmp_path / "nothing", tmp_path / "copy")
    assert "'q4_1' is no kind that a directory" in refusal_of(golden / "llama", tmp_path / "copy", "q4_1")
    assert "'q3' is no kind that a GGUF file" in refusal_of(quantized, tmp_path / "copy", "q3")
    quantize_checkpoint(golden / "llama", tmp_path / "copy", "q8_0")
    assert "is quantized already" in refusal_of(tmp_path / "copy", tmp_path / "again")
    name = "model.layers.1.mlp.up_proj.weight"
    huge = copy_case(golden / "llama", tmp_path / "huge", tensors=lambda all: all | {name: all[name] * np.float32(1e9)})
    assert f"{name} has values that float16 scales cannot hold" in refusal_of(huge, tmp_path / "again")
    nan = copy_case(golden / "llama", tmp_path / "nan", tensors=lambda all: all | {name: all[name] * np.float32("nan")})
    for kind in DIRECTORY_KINDS:
        assert f"{name} has values that float16 scales cannot hold" in refusal_of(nan, tmp_path / "again", kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "huge", "model.gguf", "nan"]
    assert read_tensors(huge).keys() == read_tensors(golden / "llama").keys()
