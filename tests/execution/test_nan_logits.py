"""Logits that are no numbers: the request ends and says so, and nobody beside it notices."""

import shutil

import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, golden_prompts, make_engine
from safetensors.numpy import load_file, save_file

from kv_execution import NanLogitsError, SamplingParams
from models import load_model

TOKENS = 8
BY = {"greedy": SamplingParams(max_tokens=TOKENS), "random": SamplingParams(max_tokens=TOKENS, temperature=1, seed=3)}


def without_a_word(to, token: int):
    """The golden llama, of which one token's embedding is damaged."""
    tensors = load_file(GOLDEN / "llama" / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = np.nan
    save_file(tensors, to / "model.safetensors")
    shutil.copy(GOLDEN / "llama" / "config.json", to)
    return load_model(to)


@pytest.mark.parametrize("provider", ["native", "reference"])
@pytest.mark.parametrize("params", BY.values(), ids=BY.keys())
def test_a_request_ends_where_its_logits_are_nan_and_its_neighbors_go_on(tmp_path, provider, params):
    prompts = golden_prompts("llama")
    sound = [
        result.tokens for result in make_engine(golden_model("llama"), provider=provider).generate(prompts, params)
    ]
    token = next(each for each in sound[0][1:-1] if each not in np.concatenate(prompts))
    engine = make_engine(without_a_word(tmp_path, token), provider=provider, debug=True)
    for result, expected in zip(engine.generate([*prompts, [5, token, 9]], params), [*sound, ()], strict=True):
        read = expected.index(token) + 1 if token in expected[:-1] else len(expected)
        assert result.tokens == expected[:read]
        assert (result.finish_reason == "nan") == (read < TOKENS)
    assert engine.stats().pages_in_use == 0


def test_a_held_request_without_a_first_token_is_not_held(tmp_path):
    engine = make_engine(without_a_word(tmp_path, 7))
    with pytest.raises(NanLogitsError, match="logits are not numbers: weights or an adapter are damaged"):
        engine.prefill_paged([5, 7, 9])
    assert engine.stats().pages_in_use == 0
    assert engine.generate_paged() == {}


def test_a_held_request_ends_where_its_logits_are_nan(tmp_path):
    prompt = golden_prompts("llama")[0]
    first = make_engine(golden_model("llama")).prefill_paged(prompt).token
    engine = make_engine(without_a_word(tmp_path, first))
    held = engine.prefill_paged(prompt)
    (output,) = engine.generate_paged().values()
    assert (held.token, output.token, output.finish_reason) == (first, None, "nan")
    assert engine.generate_paged() == {}
    engine.release(held.handle)
