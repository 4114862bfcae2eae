"""The plain implementation itself computes what transformers computes, from either layout of the config."""

import json

import numpy as np
import pytest
from plain_decoder import plain_logits
from safetensors.numpy import load_file

CASES = [
    *("llama", "llama_mqa", "llama_rope_llama3", "llama_bias_tied", "qwen2", "qwen3", "mistral_window", "gemma2"),
    *("gemma3", "phi3", "olmo2", "granite", "smollm3", "mixtral", "qwen3_moe", "arcee"),
]


@pytest.mark.parametrize("layout", ["config.json", "config_legacy.json"])
@pytest.mark.parametrize("case", CASES)
def test_its_logits_equal_transformers(golden, case, layout):
    config = json.loads((golden / case / layout).read_text())
    expected = np.load(golden / case / "expected.npz")
    tensors = load_file(golden / case / "model.safetensors")
    for prompt in (1, 3):
        logits = plain_logits(config, tensors, expected[f"prompt_{prompt}"])
        bound = max(5e-4, 5 * float(expected[f"noise_{prompt}"]))
        assert np.abs(logits - expected[f"logits_{prompt}"]).max() <= bound
