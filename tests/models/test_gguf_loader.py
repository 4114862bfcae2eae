"""GGUF files: the same model as the directory they were made from, quantized or not; every defect one line."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import gguf_name, read_tensors, write_gguf

from kv_common.errors import JaxkvError
from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, DenseWeight, MixedWeight, take_layer
from models import CheckpointError, UnsupportedModelError, load_model
from models.assembly import by_path
from models.gguf_file import read_gguf
from models.rope import inverse_frequencies

# In one program, since each operation alone would be compiled for itself.
jit_dequantize = jax.jit(dequantize, static_argnums=1)


def refusal_of(path: Path) -> str:
    with pytest.raises(JaxkvError) as refusal:
        load_model(path)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("case", ["llama", "llama_mqa", "llama_bias_tied"])
def test_an_unquantized_file_is_bit_for_bit_the_model_it_was_made_from(golden: Path, tmp_path: Path, case: str) -> None:
    model = load_model(write_gguf(golden / case, tmp_path / "model.gguf"))
    original = load_model(golden / case)
    assert model.decoder.config.layer_kinds == original.decoder.config.layer_kinds
    theirs = by_path(original.params)
    for path, leaf in by_path(model.params).items():
        values = getattr(leaf, "values", leaf)
        np.testing.assert_array_equal(values, getattr(theirs[path], "values", theirs[path]), err_msg=path)
    assert by_path(model.params).keys() == theirs.keys()


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_storage_type_holds_the_values_that_the_gguf_package_reads(
    golden: Path, tmp_path: Path, storage: str
) -> None:
    path = write_gguf(golden / "llama", tmp_path / "model.gguf", storage=lambda name: storage)
    model = load_model(path)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for leaf, name in (
        (model.params["embedding"]["weight"], "token_embd.weight"),
        (model.params["layers"]["mlp"]["down"]["weight"], "blk.{}.ffn_down.weight"),
    ):
        assert isinstance(leaf, BlockQuantWeight if storage.startswith("Q") else DenseWeight)
        names = [name.format(layer) for layer in range(2)] if "{}" in name else [name]
        theirs = np.stack([gguf.quants.dequantize(raw[each].data, raw[each].tensor_type) for each in names])
        np.testing.assert_array_equal(np.asarray(jit_dequantize(leaf, jnp.float32)).reshape(theirs.shape), theirs)


def test_quantized_q_and_k_rows_are_put_back_in_order(golden: Path, tmp_path: Path) -> None:
    model = load_model(write_gguf(golden / "llama", tmp_path / "model.gguf", storage=lambda name: "Q8_0"))
    original = read_tensors(golden / "llama")
    for part in ("q", "k"):
        ours = np.asarray(jit_dequantize(model.params["layers"]["attention"][part]["weight"], jnp.float32))
        for layer in range(2):
            exact = original[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
            assert np.abs(ours[layer] - exact).max() < 0.02


def test_layers_of_different_types_are_each_held_as_they_are_stored(golden: Path, tmp_path: Path) -> None:
    kinds = {"blk.0.ffn_up.weight": "Q8_0", "blk.1.ffn_up.weight": "Q4_1"}
    path = write_gguf(golden / "llama", tmp_path / "model.gguf", storage=lambda name: kinds.get(name, "Q8_0"))
    model = load_model(path)
    weight = model.params["layers"]["mlp"]["up"]["weight"]
    assert isinstance(weight, MixedWeight)
    assert isinstance(model.params["layers"]["mlp"]["gate"]["weight"], BlockQuantWeight)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for layer, (name, kind) in enumerate(kinds.items()):
        part = weight.parts[weight.which[layer]]
        assert part.kind == kind.lower()
        np.testing.assert_array_equal(
            jit_dequantize(take_layer(part, weight.at[layer]), jnp.float32),
            gguf.quants.dequantize(raw[name].data, raw[name].tensor_type),
        )


def test_llama3_scaling_comes_from_the_frequency_tensor(golden: Path, tmp_path: Path) -> None:
    original = load_model(golden / "llama_rope_llama3").decoder.config
    wanted = inverse_frequencies(original.layer_kinds[0].rope, original.head_dim)
    plain = original.layer_kinds[0].rope.theta ** -(np.arange(0, original.head_dim, 2) / original.head_dim)
    factors = (plain / wanted).astype(np.float32)
    assert factors.max() > 7
    path = write_gguf(golden / "llama_rope_llama3", tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})
    config = load_model(path).decoder.config
    np.testing.assert_allclose(inverse_frequencies(config.layer_kinds[0].rope, config.head_dim), wanted, rtol=1e-6)


def test_linear_scaling_is_read(golden: Path, tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = load_model(write_gguf(golden / "llama", tmp_path / "model.gguf", metadata=scaling)).decoder.config
    rope = config.layer_kinds[0].rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.type='ntk'"),
        ({"llama.expert_count": 8}, "has no llama.expert_used_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5"),
        ({"llama.a_key_from_the_future": "on"}, "llama.a_key_from_the_future='on'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking'"),
        ({"tokenizer.ggml.add_eos_token": True}, "end token after every prompt"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "malformed merge 'a b c'"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "damaged vocabulary"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(golden: Path, tmp_path: Path, metadata, named: str) -> None:
    assert named in refusal_of(write_gguf(golden / "llama", tmp_path / "model.gguf", metadata=metadata))


def test_an_unknown_architecture_is_refused_by_name(golden: Path, tmp_path: Path) -> None:
    path = write_gguf(golden / "llama", tmp_path / "model.gguf", architecture="mamba")
    assert "model.gguf is of architecture 'mamba', implemented are arcee, gemma2" in refusal_of(path)


def test_an_unsupported_storage_type_is_refused_with_the_remedy(golden: Path, tmp_path: Path) -> None:
    path = write_gguf(golden / "llama", tmp_path / "model.gguf", extra={"odd.weight": np.zeros((2, 32), np.int8)})
    message = refusal_of(path)
    assert "odd.weight is stored as I8" in message
    assert message.endswith("such as the model's Q8_0")


def test_missing_extra_and_misshapen_tensors_are_named(golden: Path, tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    assert "attn_q_norm" in refusal_of(write_gguf(golden / "llama", tmp_path / "extra.gguf", extra=extra))
    path = write_gguf(golden / "llama", tmp_path / "model.gguf")
    content = path.read_bytes()
    name = gguf_name("model.layers.1.mlp.up_proj.weight").encode()
    path.write_bytes(content.replace(name, name[:-6] + b"wejght"))
    assert "lacks blk.1.ffn_up.weight" in refusal_of(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model", b"\x80\x02}q\x00."])
def test_a_file_that_is_not_gguf_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert str(path) in refusal_of(path)


@pytest.fixture(scope="module")
def gguf_bytes(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(golden / "llama", tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def test_a_file_cut_short_anywhere_is_one_line(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for kept in [4, 7, 8, 16, 23, 24, *range(25, len(gguf_bytes), 4999), len(gguf_bytes) - 300]:
        path.write_bytes(gguf_bytes[:kept])
        with pytest.raises(CheckpointError, match="is cut short") as refusal:
            read_gguf(path)
        assert "\n" not in str(refusal.value)


@given(st.data())
def test_a_damaged_header_is_one_line_or_another_header(
    gguf_bytes: bytes, tmp_path_factory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 6000))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    message = ""
    try:
        read_gguf(path)
    except (CheckpointError, UnsupportedModelError) as refusal:
        message = str(refusal)
    assert "\n" not in message


def test_big_endian_and_first_version_files_are_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for version in (b"\x01\0\0\0", b"\0\0\0\x03"):
        path.write_bytes(b"GGUF" + version + gguf_bytes[8:])
        with pytest.raises(UnsupportedModelError, match="GGUF version"):
            read_gguf(path)
