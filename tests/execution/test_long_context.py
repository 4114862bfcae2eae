"""Sequences beyond the context of a model's training, through pages: in chunks, after a hit, filling the context."""

from pathlib import Path

import numpy as np
import pytest
from dense_step import DenseModel
from engine_case import GOLDEN, make_engine
from long_rope import DYNAMIC_CASE, LONGROPE_CASE, LongCase, plain_logits_of, write_long_case

from kv_execution import SamplingParams
from models import load_model

LONG = np.random.default_rng(5).integers(3, 320, 72)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("provider", ["native", "reference"])
@pytest.mark.parametrize("case", [LONGROPE_CASE, DYNAMIC_CASE], ids=["longrope", "dynamic"])
def test_scores_of_a_sequence_that_fills_the_context_are_those_of_a_whole_computation(
    tmp_path: Path, case: LongCase, provider: str
) -> None:
    directory = write_long_case(GOLDEN, tmp_path, case)
    engine = make_engine(
        load_model(directory, max_context=len(LONG)), provider=provider, max_step_tokens=16, max_context=None
    )
    expected = log_softmax(plain_logits_of(directory, LONG))
    assert np.abs(engine.score(LONG) - expected).max() <= 1e-3


def test_tokens_past_the_short_context_are_the_same_in_chunks_whole_and_after_a_hit(tmp_path: Path) -> None:
    model = load_model(write_long_case(GOLDEN, tmp_path, LONGROPE_CASE), max_context=96)
    prompts = [LONG[:20], LONG]  # the first outgrows the short context while it is answered
    whole = make_engine(model, provider="native", max_step_tokens=128, max_context=None).generate(prompts, GREEDY)
    engine = make_engine(model, provider="native", max_step_tokens=8, max_context=None)
    chunked, again = engine.generate(prompts, GREEDY), engine.generate(prompts, GREEDY)
    assert [each.tokens for each in chunked] == [each.tokens for each in whole]
    assert [each.tokens for each in again] == [each.tokens for each in whole]
    assert [each.cached_tokens for each in again] == [19, 71]
    dense = DenseModel(model, 96)
    assert [list(each.tokens) for each in whole] == [dense.greedy(prompt, 16) for prompt in prompts]


def test_models_of_short_and_of_long_sequences_share_no_prefix(tmp_path: Path) -> None:
    directory = write_long_case(GOLDEN, tmp_path, LONGROPE_CASE)
    short, long = (make_engine(load_model(directory, max_context=each), max_context=None) for each in (None, 64))
    assert not set(short.prefix_keys(LONG[:32])) & set(long.prefix_keys(LONG[:32]))
