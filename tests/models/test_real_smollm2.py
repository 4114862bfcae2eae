"""The real model from its GGUF file: every tensor, the first token's log-probabilities, and what it costs in memory."""

import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_step import DenseModel

from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, take_layer
from models import LoadedModel, load_model
from models.assembly import by_path
from models.families.llama import FAMILY
from models.gguf_file import read_gguf


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> LoadedModel:
    return load_model(smollm2_gguf)


@pytest.fixture(scope="module")
def reader(smollm2_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_gguf)


def test_metadata_is_what_the_gguf_package_reads(smollm2_gguf: Path, reader: gguf.GGUFReader) -> None:
    metadata = read_gguf(smollm2_gguf).metadata
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert metadata == theirs


def test_every_dequantized_tensor_equals_the_gguf_package(smollm2: LoadedModel, reader: gguf.GGUFReader) -> None:
    rows = FAMILY.gguf.rows(smollm2.decoder.config)
    raw = {tensor.name: tensor for tensor in reader.tensors}
    compared = 0
    for path, leaf in by_path(smollm2.params).items():
        template = FAMILY.gguf.names[path]
        stacked = "{layer}" in template
        for layer in range(30 if stacked else 1):
            tensor = raw[template.format(layer=layer)]
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            theirs = theirs[rows[path].order] if path in rows else theirs
            if isinstance(leaf, jax.Array):
                ours = leaf[layer] if stacked else leaf
            else:
                ours = dequantize(take_layer(leaf, layer) if stacked else leaf, jnp.float32)
            np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=tensor.name)
            compared += 1
    assert compared == 272


def test_weights_stay_quantized_in_memory(smollm2: LoadedModel, smollm2_gguf: Path) -> None:
    assert isinstance(smollm2.params["embedding"]["weight"], BlockQuantWeight)
    assert smollm2.params["layers"]["mlp"]["down"]["weight"].kind == "q4_1"
    assert smollm2.spec.parameter_bytes < smollm2_gguf.stat().st_size
    assert smollm2.spec.num_parameters == 134_515_008


def test_the_spec_says_what_the_file_says(smollm2: LoadedModel) -> None:
    spec = smollm2.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_context, spec.dtype, spec.eos_token_ids) == (49152, 8192, "float32", (2,))


@pytest.mark.usefixtures("fully_optimized")
def test_log_probabilities_and_first_tokens_equal_the_reference(smollm2: LoadedModel, golden: Path) -> None:
    prompts = json.loads((golden / "real_smollm2" / "expected.json").read_text())["prompts"]
    dense = DenseModel(smollm2, length=48)
    for prompt in prompts:
        logits = dense.last_logits(prompt["prompt_ids"]).astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        np.testing.assert_allclose(logprobs[prompt["first_top5_ids"]], prompt["first_top5_logprobs"], atol=5e-4)
        assert np.argsort(-logprobs)[:5].tolist() == prompt["first_top5_ids"]
        assert dense.greedy(prompt["prompt_ids"], 3) == prompt["greedy_ids"][:3]
