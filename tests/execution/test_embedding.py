"""Prompts to vectors and to scores: what a plain pass over the whole prompt pools, however the engine divides it."""

import json
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, golden_prompts, make_engine
from lora_files import write_adapter, write_merged
from plain_decoder import plain_hidden
from safetensors.numpy import load_file, save_file

from kv_common.errors import JaxkvError
from kv_execution import EmbeddingError, SamplingParams
from models import load_model

POOLED = {"mean": lambda hidden: hidden.mean(0), "last": lambda hidden: hidden[-1], "cls": lambda hidden: hidden[0]}
ROUNDING = {"atol": 1e-6, "rtol": 1e-5}
"""Of float32: the last norm is not one of the native kernels, whose bits are the same in every batch."""


def plain(directory, ids) -> np.ndarray:
    """Final hidden states [tokens, hidden] in float64."""
    config = json.loads((directory / "config.json").read_text())
    return plain_hidden(config, load_file(directory / "model.safetensors"), ids)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize(("case", "provider"), [("llama", "reference"), ("llama", "native"), ("gemma2", "native")])
def test_pooled_hidden_states_are_those_of_a_plain_pass(case, provider, pooling):
    prompts = golden_prompts(case)
    expected = np.array([POOLED[pooling](plain(GOLDEN / case, prompt)) for prompt in prompts])
    engine = make_engine(golden_model(case), provider=provider, max_step_tokens=32, debug=True)
    vectors = engine.embed(prompts, pooling=pooling, normalize=False)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-4, rtol=1e-4)
    unit = engine.embed(prompts, pooling=pooling)
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=-1, keepdims=True), atol=1e-4)
    assert engine.stats().pages_in_use == 0


def test_alone_in_a_batch_and_in_chunks_are_the_same_to_rounding():
    prompts = [*golden_prompts("llama"), golden_prompts("llama")[2]] * 2  # more than there are rows
    engine = make_engine(golden_model("llama"), provider="native")
    together = engine.embed(prompts, normalize=False)
    alone = np.concatenate([engine.embed([prompt], normalize=False) for prompt in prompts])
    chunked = make_engine(golden_model("llama"), provider="native", max_step_tokens=7).embed(prompts, normalize=False)
    np.testing.assert_allclose(together, alone, **ROUNDING)
    np.testing.assert_allclose(together, chunked, **ROUNDING)


def test_prompts_that_do_not_fit_together_are_computed_one_after_the_other():
    prompts = golden_prompts("llama")
    expected = make_engine(golden_model("llama"), provider="native").embed(prompts)
    engine = make_engine(golden_model("llama"), provider="native", pages=6)  # the longest has 5
    np.testing.assert_allclose(engine.embed(prompts[::-1]), expected[::-1], **ROUNDING)
    with pytest.raises(JaxkvError, match="the pool has 6"):
        engine.embed([prompts[0], np.arange(3, 103)])
    assert engine.stats().pages_in_use == 0


def test_a_prompt_that_fills_the_context_is_embedded_and_scored_but_not_answered():
    full = np.random.default_rng(2).integers(3, 320, 128)
    engine = make_engine(golden_model("llama"), provider="native", pages=8, debug=True)  # and the pool
    expected = plain(GOLDEN / "llama", full)
    np.testing.assert_allclose(engine.embed([full], normalize=False)[0], expected.mean(0), atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(engine.score(full)[:-1], engine.score(full[:-1]))
    for refused in (engine.prefill_paged, engine.batcher().submit):
        with pytest.raises(JaxkvError, match="128 tokens and the context holds 128, one of them for the answer"):
            refused(full)
    with pytest.raises(JaxkvError, match="129 tokens and the context holds 128; shorten"):
        engine.embed([[*full, 3]])
    assert engine.stats().pages_in_use == 0


def test_cached_pages_take_nothing_away_and_running_requests_go_on():
    prompts = golden_prompts("llama")
    engine = make_engine(golden_model("llama"), provider="native", debug=True)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = engine.embed(prompts)
    tokens = engine.generate([prompts[3]], params)[0].tokens  # behind pages that `embed` has published
    engine.init_paged_runtime()
    assert engine.generate([prompts[3]], params)[0].tokens == tokens
    batcher = engine.batcher()
    request = batcher.submit(prompts[3], params)
    outputs = batcher.step() + batcher.step()
    np.testing.assert_allclose(engine.embed(prompts), expected, **ROUNDING)
    while batcher.has_unfinished:
        outputs += batcher.step()
    assert tuple(output.token for output in outputs if output.request_id == request) == tokens


def test_an_adapter_changes_the_vectors_as_merged_weights_do(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / "llama", ("q_proj", "down_proj"))
    merged = write_merged(tmp_path / "merged", GOLDEN / "llama", adapter, 0.5)
    engine = make_engine(golden_model("llama"), provider="native", max_adapters=1)
    engine.adapters.load("it", adapter)
    prompts = golden_prompts("llama")[1:3]
    expected = np.array([plain(merged, prompt).mean(0) for prompt in prompts])
    np.testing.assert_allclose(engine.embed(prompts, normalize=False, adapter="it"), expected, atol=1e-4, rtol=1e-4)


def classifier(to, labels: int, **config):
    """The golden llama with a head of so many labels in the place of its output matrix."""
    tensors = load_file(GOLDEN / "llama" / "model.safetensors")
    del tensors["lm_head.weight"]
    shape = (labels, tensors["model.norm.weight"].size)
    tensors["score.weight"] = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    fields = json.loads((GOLDEN / "llama" / "config.json").read_text())
    fields |= {"architectures": ["LlamaForSequenceClassification"], **config}
    to.mkdir(parents=True, exist_ok=True)
    (to / "config.json").write_text(json.dumps(fields))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize(("labels", "width"), [(1, 1), (2, 1), (5, 2)])
def test_a_classifier_scores_the_last_token_of_each_prompt(labels, width, tmp_path):
    names = {} if labels == 2 else {"id2label": {str(label): f"L{label}" for label in range(labels)}}
    path = classifier(tmp_path, labels, **names)
    prompts = golden_prompts("llama")
    weight = load_file(path / "model.safetensors")["score.weight"].astype(np.float64)
    expected = np.array([weight @ plain(path, prompt)[-1] for prompt in prompts])
    engine = make_engine(load_model(path, tensor_parallel=width), provider="native", max_step_tokens=32)
    scores = engine.classify(prompts)
    assert scores.shape == (4, labels)
    np.testing.assert_allclose(scores, expected, atol=2e-4, rtol=1e-4)
    mean = np.array([plain(path, prompt).mean(0) for prompt in prompts])
    np.testing.assert_allclose(engine.embed(prompts, normalize=False), mean, atol=1e-4, rtol=1e-4)


def test_a_model_saved_without_its_output_matrix_makes_embeddings_alone(tmp_path):
    tensors = load_file(GOLDEN / "llama" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    fields = json.loads((GOLDEN / "llama" / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    engine = make_engine(load_model(tmp_path), provider="native")
    prompts = golden_prompts("llama")
    expected = make_engine(golden_model("llama"), provider="native").embed(prompts, pooling="last")
    np.testing.assert_array_equal(engine.embed(prompts, pooling="last"), expected)
    for refused in (engine.generate, lambda prompts: engine.score(prompts[0]), lambda p: engine.prefill_paged(p[0])):
        with pytest.raises(JaxkvError, match="has no output matrix and generates nothing; use embed"):
            refused(prompts)
    with pytest.raises(EmbeddingError, match="has no classification head; use embed"):
        engine.classify(prompts)


def test_what_a_model_cannot_do_is_refused(tmp_path):
    engine = make_engine(golden_model("llama"), provider="native")
    with pytest.raises(EmbeddingError, match="llama has no classification head; use embed"):
        engine.classify([[3, 4]])
    with pytest.raises(EmbeddingError, match="pooling is 'max'; give one of mean, last, cls"):
        engine.embed([[3, 4]], pooling="max")
    model = load_model(classifier(tmp_path / "two", 2))
    judge = make_engine(model, provider="native")
    for refused in (judge.generate, lambda prompts: judge.score(prompts[0]), lambda p: judge.prefill_paged(p[0])):
        with pytest.raises(JaxkvError, match="classifies sequences with 2 labels and generates nothing; use classify"):
            refused([[3, 4]])
    with pytest.raises(JaxkvError, match=r"score.weight has shape \[3, 64\], the configuration calls for \[2, 64\]"):
        load_model(classifier(tmp_path / "three", 3))
    with pytest.raises(JaxkvError, match="architectures='MistralForSequenceClassification' where model_type"):
        load_model(classifier(tmp_path / "other", 2, architectures=["MistralForSequenceClassification"]))


@pytest.mark.parametrize("kind", ["embed_steps", "score_steps"])
def test_a_program_that_compiles_beside_is_waited_for_and_compiled_once(kind):
    engine, prompt = make_engine(golden_model("llama"), provider="native", max_step_tokens=32), list(range(3, 43))
    given = [prompt, prompt[:5]] if kind == "embed_steps" else prompt
    waiting: list[tuple[Future, Callable]] = []

    def beside(function):
        waiting.append((Future(), function))
        return waiting[-1][0]

    parts = getattr(engine, kind)(given, beside=beside)
    got, idle = [], 0
    for part in parts:
        got.append(part)
        for future, function in waiting:
            if not future.done():
                idle += 1
                assert len(part) == 0
                future.set_result(function())
    assert idle == len(waiting) > 1  # each shape once
    traces = engine.stats().traces
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(list(getattr(engine, kind)(given))))
    assert engine.stats().traces == traces
