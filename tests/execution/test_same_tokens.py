"""A request yields the same tokens whatever happens around it."""

from dataclasses import replace

import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, golden_prompts, make_engine

from kv_execution import GenerationResult, SamplingParams
from kv_kernels.native import load_library
from models import LoadedModel, load_model
from models.quantized_copy import quantize_checkpoint

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LOGPROBS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, top_k=40, top_p=0.95, seed=1234)


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    return golden_prompts("llama")


@pytest.fixture(scope="module")
def expected(prompts) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of every prompt run alone, one engine for all."""
    engine = make_engine(golden_model("llama"))
    return {
        name: [engine.generate([prompt], params)[0].tokens for prompt in prompts]
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))
    }


@pytest.mark.parametrize("chunk", [1, pytest.param(7, marks=pytest.mark.slow), 16, 64])
def test_a_prompt_computed_in_chunks_continues_as_a_whole_one(chunk, prompts, expected):
    engine = make_engine(golden_model("llama"), max_step_tokens=chunk, max_requests=1)
    for index, prompt in enumerate(prompts):
        assert engine.generate([prompt], GREEDY)[0].tokens == expected["greedy"][index]
        assert engine.generate([prompt], SAMPLED)[0].tokens == expected["sampled"][index]


@pytest.mark.parametrize("provider", [pytest.param("reference", marks=pytest.mark.slow), "native"])
def test_neighbours_that_come_and_go_change_nothing(provider, prompts, expected):
    engine = make_engine(golden_model("llama"), max_requests=16, max_step_tokens=64, debug=True, provider=provider)
    batcher = engine.batcher()
    rng = np.random.default_rng(0)
    tokens: dict[int, list[int]] = {}
    wanted: dict[int, tuple[int, ...]] = {}
    submitted = 0
    while submitted < 60 or batcher.has_unfinished:
        while submitted < 60 and len(tokens) - sum(len(wanted[key]) == len(got) for key, got in tokens.items()) < 16:
            index = int(rng.integers(4))
            kind, params = (("greedy", GREEDY), ("sampled", SAMPLED))[int(rng.integers(2))]
            length = int(rng.integers(1, 25))
            request = batcher.submit(prompts[index], replace(params, max_tokens=length))
            tokens[request], wanted[request] = [], expected[kind][index][:length]
            submitted += 1
        for output in batcher.step():
            tokens[output.request_id].append(output.token)
    assert {key: tuple(got) for key, got in tokens.items()} == wanted
    assert engine.stats().pages_in_use == 0


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_log_probabilities_have_the_same_bits_alone_together_in_chunks_and_after_a_prefix_hit(dtype, prompts):
    assert_the_same_bits(golden_model("llama", dtype), prompts)


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.skipif(not load_library().has_int8_products, reason="the native kernels of this CPU gain nothing by it")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["gemma2", "gemma3", "olmo2", "qwen3", "mixtral", "qwen3_moe"])
def test_hidden_states_of_every_kind_of_network_have_the_same_bits_in_steps_of_any_size(case, dtype):
    model, prompt = golden_model(case, dtype), list(range(5, 65))
    sizes = (8, 32, 64)
    first, *others = (
        make_engine(model, provider="native", max_requests=4, max_step_tokens=size).embed([prompt], normalize=False)
        for size in sizes
    )
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_so_they_have_with_activations_of_eight_bits(tmp_path, prompts):
    quantize_checkpoint(GOLDEN / "llama", tmp_path / "quantized", "q4_0")
    model = load_model(tmp_path / "quantized", dtype="bfloat16")
    rounded = assert_the_same_bits(model, prompts, int8_activations=True)
    plain = make_engine(model, provider="native").generate(prompts, LOGPROBS)
    assert [result.logprobs for result in rounded] != [result.logprobs for result in plain]


def assert_the_same_bits(model: LoadedModel, prompts, **settings) -> list[GenerationResult]:
    """Their results, alone."""
    params = LOGPROBS
    engine = make_engine(model, provider="native", **settings)
    alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    again = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert any(result.cached_tokens for result in again)
    together = engine.generate([*prompts, *prompts], params)
    few = make_engine(model, provider="native", max_step_tokens=7, max_requests=3, **settings)
    chunked = few.generate(prompts, params)
    for results in (again, together[:4], together[4:], chunked):
        for mine, theirs in zip(results, alone, strict=True):
            assert (mine.tokens, mine.logprobs) == (theirs.tokens, theirs.logprobs)
    return alone


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_a_preemption_at_any_step_changes_nothing(name, prompts, expected):
    # Without the prefix cache, so that every prompt takes as many steps as the first.
    engine = make_engine(golden_model("llama"), max_step_tokens=16, debug=True, prefix_cache=False)
    batcher = engine.batcher()
    params = {"greedy": GREEDY, "sampled": SAMPLED}[name]
    for index in (1, 2):
        steps = -(-len(prompts[index]) // 16) + 23  # the last chunk samples the first of the 24 tokens
        for preempted_at in range(1, steps):
            request = batcher.submit(prompts[index], params)
            tokens = []
            for step in range(10 * steps):
                if step == preempted_at:
                    assert batcher.preempt(request)
                tokens += [output.token for output in batcher.step()]
                if not batcher.has_unfinished:
                    break
            assert tuple(tokens) == expected[name][index], f"preempted before step {preempted_at}"
    assert engine.stats().pages_in_use == 0


def test_a_seed_gives_the_same_tokens_at_any_batch_and_row(prompts, expected):
    engine = make_engine(golden_model("llama"))
    for batch in (1, 4):
        for row in range(batch):
            others = [prompts[0]] * batch
            others[row] = prompts[2]
            params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.3, seed=7 + i) for i in range(batch)]
            params[row] = SAMPLED
            assert engine.generate(others, params)[row].tokens == expected["sampled"][2]


def test_another_seed_gives_other_tokens(prompts, expected):
    other = make_engine(golden_model("llama")).generate([prompts[2]], replace(SAMPLED, seed=1235))[0].tokens
    assert other != expected["sampled"][2]


def test_handles_driven_by_hand_give_the_same(prompts, expected):
    engine = make_engine(golden_model("llama"), debug=True)
    tokens: dict = {}
    for prompt in prompts[:3]:
        first = engine.prefill_paged(prompt, GREEDY)
        tokens[first.handle] = [first.token]
    while step := engine.generate_paged():
        for handle, output in step.items():
            tokens[handle].append(output.token)
    for handle, index in zip(list(tokens), range(3), strict=True):
        assert tuple(tokens[handle]) == expected["greedy"][index]
        engine.release(handle)
    assert engine.stats().pages_in_use == 0
