"""Every llama case computes what transformers computes: logits, greedy tokens, from either layout of the config."""

from pathlib import Path

import numpy as np
import pytest
from dense_step import DenseModel
from model_files import copy_case

from models import load_model

CASES = ["llama", "llama_mqa", "llama_rope_llama3", "llama_bias_tied"]


def up_to_a_constant(difference: np.ndarray) -> np.ndarray:
    return difference - difference.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_the_reference(golden: Path, case: str) -> None:
    expected = np.load(golden / case / "expected.npz")
    dense = DenseModel(load_model(golden / case))
    for prompt in range(4):
        ids = expected[f"prompt_{prompt}"]
        logits = dense.logits(ids)
        bound = max(5e-4, 5 * float(expected[f"noise_{prompt}"]))
        assert np.abs(up_to_a_constant(logits - expected[f"logits_{prompt}"])).max() <= bound
        assert dense.greedy(ids, 24) == expected[f"greedy_{prompt}"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_both_layouts_of_the_config_are_the_same_model(golden: Path, case: str, tmp_path: Path) -> None:
    new, old = load_model(golden / case), load_model(copy_case(golden / case, tmp_path / case, legacy=True))
    assert old.decoder.config == new.decoder.config
    assert old.fingerprint == new.fingerprint
    expected = np.load(golden / case / "expected.npz")
    logits = DenseModel(old, length=8).logits(expected["prompt_1"])
    assert np.abs(up_to_a_constant(logits - expected["logits_1"])).max() <= 5e-4
