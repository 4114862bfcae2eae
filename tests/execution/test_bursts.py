"""Several decode steps in one program give what single steps give."""

import numpy as np
import pytest
from engine_case import golden_model, make_engine

from benchmarks.random_llama import write_random_llama
from kv_execution import EngineConfig, SamplingParams
from kv_execution.burst_pace import BurstPace
from kv_execution.config import EngineConfigError
from models import load_model

PROMPTS = [np.arange(3, 3 + tokens) for tokens in (5, 40, 17)]
ALWAYS = 1e9


def engine_of(name="llama", **settings):
    return make_engine(golden_model(name), debug=True, **settings)


@pytest.mark.parametrize("provider", ["native", "reference"])
@pytest.mark.parametrize("tokens_per_page", [4, 16])
def test_tokens_steps_and_kv_are_those_of_single_steps(provider, tokens_per_page, dispatched):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (30, 9, 20)]
    settings = {"provider": provider, "tokens_per_page": tokens_per_page}
    single, together = engine_of(**settings), engine_of(burst_s=ALWAYS, **settings)
    expected = single.generate(PROMPTS, params)
    assert set(dispatched) == {1}
    pointers = [pool.unsafe_buffer_pointer() for pool in together._runtime.state.pools]
    results = together.generate(PROMPTS, params)
    assert [pool.unsafe_buffer_pointer() for pool in together._runtime.state.pools] == pointers
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    assert max(dispatched) == min(tokens_per_page, 8)
    assert together.stats().steps == single.stats().steps
    assert together.stats().decode_tokens == single.stats().decode_tokens
    again = [
        engine.generate([np.append(PROMPTS[1], expected[1].tokens)], params[:1])[0] for engine in (single, together)
    ]
    assert again[0] == again[1]
    assert again[1].cached_tokens > len(PROMPTS[1]) - tokens_per_page, "pages that a burst filled are not found"


@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "gemma3", "mixtral", "qwen3_moe", "qwen3", "olmo2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_decode_in_bursts_as_in_single_steps(name, dtype, dispatched):
    params = SamplingParams(max_tokens=40, ignore_eos=True)  # past the windows
    model = golden_model(name, dtype)
    expected = make_engine(model, debug=True).generate(PROMPTS, params)
    results = make_engine(model, debug=True, burst_s=ALWAYS).generate(PROMPTS, params)
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    assert max(dispatched) == 8


def test_two_devices_decode_in_bursts_as_one_does(tmp_path, dispatched):
    write_random_llama(tmp_path, layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = make_engine(load_model(tmp_path)).generate(PROMPTS, params)
    model = load_model(tmp_path, tensor_parallel=2)
    engine = make_engine(model, tensor_parallel=2, debug=True, burst_s=ALWAYS)
    assert [result.tokens for result in engine.generate(PROMPTS, params)] == [each.tokens for each in expected]
    assert max(dispatched) == 8


def test_one_that_comes_meanwhile_gets_in_and_gets_what_it_gets_alone(dispatched):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = engine_of().generate(PROMPTS[:2], params)
    batcher = engine_of(burst_s=ALWAYS).batcher()
    tokens = {batcher.submit(PROMPTS[0], params): []}
    while sum(steps > 1 for steps in dispatched) < 2:
        for output in batcher.step():
            tokens[output.request_id].append(output.token)
    tokens[batcher.submit(PROMPTS[1], params)] = []
    while batcher.has_unfinished:
        for output in batcher.step():
            tokens[output.request_id].append(output.token)
    assert [tuple(each) for each in tokens.values()] == [result.tokens for result in expected]


def test_the_pace_follows_how_long_steps_take():
    now = 0.0
    pace = BurstPace(0.05, lambda: now)
    assert pace.steps(8) == 1  # nothing was timed
    pace.collected(1)
    assert pace.steps(8) == 1
    for taken, made, allowed in ((0.001, 1, 8), (0.08, 8, 5), (0.4, 1, 1), (3600.0, 8, 1), (0.02, 1, 2)):
        now += taken
        pace.collected(made)
        assert pace.steps(8) == allowed
    never = BurstPace(0.0, lambda: now)
    never.collected(1)
    assert never.steps(8) == 1


@pytest.mark.parametrize("seconds", [-1, True, "x", float("nan"), float("inf"), 10**400])
def test_a_burst_of_no_length_is_refused(seconds):
    with pytest.raises(EngineConfigError, match="give seconds, 0 or more"):
        EngineConfig(burst_s=seconds)
