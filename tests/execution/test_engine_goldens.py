"""The engine against what Hugging Face transformers computed with the same weights."""

import json
import shutil

import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, make_engine

from kv_execution import EngineConfig, PagedEngine, SamplingParams
from models import load_model

MODEL_NOISE = 5e-4
"""What the golden data allows two float32 computations of one model to differ by, in logits."""

CASES = ("llama", "llama_mqa", "llama_rope_llama3", "llama_bias_tied")
ON_THE_REFERENCE = {("llama", 1), ("llama_mqa", 64)}
"""Cases and page sizes that run there by default, since it is slow to compile; the others are slow tests there."""

GREEDY_24 = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=True)


def assert_equals_golden(model, case: str, tokens_per_page: int, provider: str) -> None:
    expected = np.load(GOLDEN / case / "expected.npz")
    engine = make_engine(model, tokens_per_page=tokens_per_page, max_step_tokens=128, provider=provider)
    prompts = [expected[f"prompt_{index}"] for index in range(4)]
    results = engine.generate(prompts, GREEDY_24)
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert list(result.tokens) == expected[f"greedy_{index}"].tolist(), f"prompt {index}"
        bound = max(MODEL_NOISE, 5 * float(expected[f"noise_{index}"]))
        if len(prompt) < 16:
            continue  # within one page; their shapes would be compiled for nothing else
        difference = engine.score(prompt) - expected[f"logits_{index}"]
        # Log-probabilities and logits differ by a constant per row.
        difference -= difference.mean(axis=-1, keepdims=True)
        assert np.abs(difference).max() <= bound, f"prompt {index}"
    assert engine.stats().pages_in_use == 0


@pytest.mark.parametrize(
    ("case", "provider", "tokens_per_page"),
    [
        *((case, "native", 16) for case in CASES),
        *(
            pytest.param(
                *(case, "reference", tokens_per_page),
                marks=() if (case, tokens_per_page) in ON_THE_REFERENCE else pytest.mark.slow,
            )
            for case in CASES
            for tokens_per_page in (1, 16, 64)
        ),
    ],
)
def test_greedy_tokens_and_logits_equal_transformers(case, provider, tokens_per_page):
    assert_equals_golden(golden_model(case), case, tokens_per_page, provider)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_with_the_older_config_layout_gives_the_same(case, tmp_path):
    for name in ("model.safetensors", "generation_config.json"):
        shutil.copy(GOLDEN / case / name, tmp_path / name)
    shutil.copy(GOLDEN / case / "config_legacy.json", tmp_path / "config.json")
    assert_equals_golden(load_model(tmp_path), case, 16, "native")


def test_penalised_greedy_sequences_equal_transformers():
    expected = np.load(GOLDEN / "sampling" / "expected.npz")
    settings = {
        "greedy": {},
        "greedy_repetition": {"repetition_penalty": 1.3},
        "greedy_presence": {"presence_penalty": 0.8},
        "greedy_frequency": {"frequency_penalty": 0.5},
        "greedy_both": {"presence_penalty": 0.8, "frequency_penalty": 0.5},
    }
    engine = make_engine(golden_model("llama"))
    each = [SamplingParams(max_tokens=24, ignore_eos=True, top_logprobs=5, **chosen) for chosen in settings.values()]
    results = engine.generate([expected["prompt"]] * len(each), each)
    for name, result in zip(settings, results, strict=True):
        assert list(result.tokens) == expected[name].tolist(), name
    np.testing.assert_allclose(results[0].logprobs, expected["greedy_logprobs"], atol=MODEL_NOISE)
    top = results[0].top_logprobs
    assert [[entry.token for entry in row] for row in top] == expected["greedy_top5_ids"].tolist()
    got = [[entry.logprob for entry in row] for row in top]
    np.testing.assert_allclose(got, expected["greedy_top5_logprobs"], atol=MODEL_NOISE)


def test_prompt_log_probabilities_equal_transformers():
    expected = np.load(GOLDEN / "sampling" / "expected.npz")
    prompt = expected["prompt"]
    logprobs = make_engine(golden_model("llama")).score(prompt)
    np.testing.assert_allclose(logprobs[np.arange(32), prompt[1:]], expected["prompt_logprobs"][1:], atol=MODEL_NOISE)
    got = np.take_along_axis(logprobs, expected["top5_ids"].astype(np.int64), axis=1)
    np.testing.assert_allclose(got, expected["top5_logprobs"], atol=MODEL_NOISE)


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize(
    ("provider", "max_step_tokens"), [pytest.param("reference", 256, marks=pytest.mark.slow), ("native", 24)]
)
def test_a_real_quantized_model_continues_as_in_transformers(smollm2_gguf, provider, max_step_tokens):
    expected = json.loads((GOLDEN / "real_smollm2" / "expected.json").read_text())
    cases = expected["prompts"]
    engine = PagedEngine(
        load_model(smollm2_gguf),
        EngineConfig(
            kv_pool_bytes=64 << 20,
            max_requests=4,
            max_step_tokens=max_step_tokens,
            max_context=256,
            provider=provider,
        ),
    )
    engine.init_paged_runtime()
    params = SamplingParams(max_tokens=32, ignore_eos=True, top_logprobs=5)
    results = engine.generate([case["prompt_ids"] for case in cases], params)
    for case, result in zip(cases, results, strict=True):
        assert list(result.tokens) == case["greedy_ids"]
        assert [entry.token for entry in result.top_logprobs[0]] == case["first_top5_ids"]
        got = [entry.logprob for entry in result.top_logprobs[0]]
        np.testing.assert_allclose(got, case["first_top5_logprobs"], atol=MODEL_NOISE)
