"""Every family computes what transformers computes: logits, greedy tokens, from either layout of the config."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from dense_step import DenseModel
from model_files import copy_case

from models import load_model

LLAMA_CASES = ["llama", "llama_mqa", "llama_rope_llama3", "llama_bias_tied"]
FAMILY_CASES = [
    *("qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3"),
    *("mixtral", "qwen3_moe", "arcee"),
]


def assert_logits_equal_the_reference(dense: DenseModel, expected: Mapping[str, np.ndarray]) -> None:
    for prompt in range(4):
        logits = dense.logits(expected[f"prompt_{prompt}"])
        bound = max(5e-4, 5 * float(expected[f"noise_{prompt}"]))
        assert np.abs(logits - expected[f"logits_{prompt}"]).max() <= bound


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_logits_and_greedy_tokens_equal_the_reference(golden: Path, case: str) -> None:
    expected = np.load(golden / case / "expected.npz")
    dense = DenseModel(load_model(golden / case))
    assert_logits_equal_the_reference(dense, expected)
    for prompt in range(4):
        assert dense.greedy(expected[f"prompt_{prompt}"], 24) == expected[f"greedy_{prompt}"].tolist()


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_of_every_family_equal_the_reference(golden: Path, case: str) -> None:
    expected = np.load(golden / case / "expected.npz")
    assert_logits_equal_the_reference(DenseModel(load_model(golden / case)), expected)


@pytest.mark.parametrize("case", LLAMA_CASES + FAMILY_CASES)
def test_both_layouts_of_the_config_are_the_same_model(golden: Path, case: str, tmp_path: Path) -> None:
    new, old = load_model(golden / case), load_model(copy_case(golden / case, tmp_path / case, legacy=True))
    assert old.decoder.config == new.decoder.config
    assert old.fingerprint == new.fingerprint
    expected = np.load(golden / case / "expected.npz")
    logits = DenseModel(old).logits(expected["prompt_1"])
    assert np.abs(logits - expected["logits_1"]).max() <= 5e-4
