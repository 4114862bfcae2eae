"""GGUF files of every family hold the model that they were made from, quantized or not."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from dense_step import DenseModel
from family_gguf import ARCHITECTURES, write_family_gguf

from kv_common.errors import JaxkvError
from kv_kernels.weights import BlockQuantWeight
from models import load_model
from models.assembly import by_path
from models.config import DecoderConfig

_NOT_IN_THE_FILE = {"architecture", "attention_scale"}
"""Named otherwise, and for Gemma 2 the tiny model's own."""


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_an_unquantized_file_is_bit_for_bit_the_model_it_was_made_from(golden: Path, tmp_path: Path, case: str) -> None:
    model, original = load_model(write_family_gguf(golden / case, tmp_path / "model.gguf")), load_model(golden / case)
    for field in dataclasses.fields(DecoderConfig):
        got, wanted = (getattr(each.decoder.config, field.name) for each in (model, original))
        if field.name not in _NOT_IN_THE_FILE:
            assert got == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted), field.name
    leaves, originals = by_path(model.params), by_path(original.params)
    assert leaves.keys() == originals.keys()
    for path, leaf in leaves.items():
        for got, wanted in zip(jax.tree.leaves(leaf), jax.tree.leaves(originals[path]), strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=path)


@pytest.mark.parametrize("case", ["phi3", "qwen3_moe"])
def test_fused_and_stacked_matrices_stay_quantized(golden: Path, tmp_path: Path, case: str) -> None:
    def storage(name: str) -> str:
        return "F32" if "gate_inp" in name else "Q8_0"

    model = load_model(write_family_gguf(golden / case, tmp_path / "model.gguf", storage=storage))
    mlp, exact = model.params["layers"]["mlp"], load_model(golden / case).params["layers"]["mlp"]
    for name in mlp.keys() - {"router"}:
        weight = mlp[name]["weight"]
        assert isinstance(weight, BlockQuantWeight)
        assert (*weight.stack, weight.out_features, weight.in_features) == exact[name]["weight"].values.shape
    expected = np.load(golden / case / "expected.npz")
    logits = DenseModel(model, 8).logits(expected["prompt_1"])
    assert np.abs(logits - expected["logits_1"]).max() < 1.5


@pytest.mark.parametrize("storage", ["F32", "Q8_0"])
def test_a_mixture_with_a_tensor_for_each_expert_is_the_one_with_stacked_experts(
    golden: Path, tmp_path: Path, storage: str
) -> None:
    def kind(name: str) -> str:
        return "F32" if "gate_inp" in name or "down" in name else storage

    stacked, separate = (
        load_model(
            write_family_gguf(golden / "mixtral", tmp_path / f"{apart}.gguf", storage=kind, separate_experts=apart)
        )
        for apart in (False, True)
    )
    assert separate.fingerprint == stacked.fingerprint


def test_a_missing_expert_is_named(golden: Path, tmp_path: Path) -> None:
    metadata = {"llama.expert_count": 5, "llama.expert_used_count": 2}
    path = write_family_gguf(golden / "mixtral", tmp_path / "model.gguf", metadata=metadata, separate_experts=True)
    with pytest.raises(JaxkvError, match=r"lacks blk.0.ffn_down.4.weight and 5 more"):
        load_model(path)


def test_the_pattern_of_windows_and_the_local_rope_of_a_released_gemma_3_are_known(
    golden: Path, tmp_path: Path
) -> None:
    path = write_family_gguf(
        golden / "gemma3", tmp_path / "model.gguf", metadata={"gemma3.attention.sliding_window_pattern": 6}
    )
    config = load_model(path).decoder.config
    assert config.windows == (16, 16, 16, 16)
    assert {kind.rope.theta for kind in config.layer_kinds} == {10000.0}


def test_short_factors_of_longrope_are_taken_with_the_context_that_they_serve(golden: Path, tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8).astype(np.float32)
    path = write_family_gguf(
        golden / "phi3",
        tmp_path / "model.gguf",
        metadata={
            "phi3.rope.scaling.original_context_length": 64,
            "phi3.rope.scaling.attn_factor": 1.25,
            "phi3.attention.sliding_window": 0,
        },
        extra={"rope_factors_short.weight": factors, "rope_factors_long.weight": 2 * factors},
    )
    config = load_model(path).decoder.config
    rope = config.layer_kinds[0].rope
    assert (rope.frequency_divisors, rope.attention_factor) == (tuple(factors.tolist()), 1.25)
    assert (config.max_context, config.windows[0]) == (64, None)


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_key_that_nobody_knows_is_refused_by_name_in_every_family(golden: Path, tmp_path: Path, case: str) -> None:
    architecture = ARCHITECTURES[case]
    for key, value in (("surprise_norm", 2.0), ("rope.scaling.type", "spiral"), ("attention.causal", False)):
        path = write_family_gguf(golden / case, tmp_path / "model.gguf", metadata={f"{architecture}.{key}": value})
        with pytest.raises(JaxkvError, match=rf"{architecture}.{key}={value!r}"):
            load_model(path)


@pytest.mark.parametrize(
    ("case", "metadata", "named"),
    [
        ("granite", {"granite.rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned=False"),
        ("granite", {"granite.rope.dimension_count": 8}, "granite.rope.dimension_count=8"),
        ("qwen2", {"qwen2.pooling_type": 3}, "qwen2.pooling_type=3"),
        ("qwen3", {"qwen3.attention.scale": 0.5}, "qwen3.attention.scale=0.5"),
        ("qwen3_moe", {"qwen3moe.expert_shared_count": 1}, "qwen3moe.expert_shared_count=1"),
        ("olmo2", {"olmo2.attention.sliding_window": 8}, "olmo2.attention.sliding_window=8"),
    ],
)
def test_what_a_family_does_not_implement_is_refused_by_name(
    golden: Path, tmp_path: Path, case: str, metadata: dict, named: str
) -> None:
    with pytest.raises(JaxkvError) as refusal:
        load_model(write_family_gguf(golden / case, tmp_path / "model.gguf", metadata=metadata))
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)
