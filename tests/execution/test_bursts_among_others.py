"""Bursts beside prompts, samplers, constraints, preemptions, aborts and damage: as single steps."""

import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, make_engine
from safetensors.numpy import load_file, save_file

from kv_execution import SamplingParams
from models import load_model

COMMON = np.arange(100, 140)
PROMPTS = [np.append(COMMON, np.arange(3, 3 + tokens)) for tokens in (5, 20, 1)]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


def engine_of(*, bursts: bool, model=None, debug=True, **settings):
    """An engine of bursts that are as long as they may be, or of single steps; its page of padding is NaN."""
    engine = make_engine(model or golden_model("llama"), debug=debug, burst_s=1e9 * bursts, **settings)
    engine.warmup_paged(shapes=engine.describe().shapes[:1], params=[GREEDY])
    return engine


def both(params, *, prompts=PROMPTS, **settings):
    """The results of single steps and of bursts."""
    return [engine_of(bursts=bursts, **settings).generate(prompts, params) for bursts in (False, True)]


def tokens_of(results) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


class Run:
    """Steps a batcher and keeps what it gives, by request."""

    def __init__(self, engine) -> None:
        self.batcher = engine.batcher()
        self.outputs: dict[int, list] = {}

    def submit(self, prompt, params=GREEDY, **options) -> int:
        request = self.batcher.submit(prompt, params, **options)
        self.outputs[request] = []
        return request

    def step(self) -> None:
        for output in self.batcher.step():
            self.outputs[output.request_id].append(output)

    def until(self, condition) -> None:
        for _ in range(300):
            if condition():
                return
            self.step()
        raise AssertionError("not so after 300 steps")

    def to_end(self) -> None:
        self.until(lambda: not self.batcher.has_unfinished)

    def tokens(self, request) -> tuple[int, ...]:
        return tuple(output.token for output in self.outputs[request])


def kv_of(engine, request, tokens: int | None) -> list[np.ndarray]:
    """K and V of the first `tokens`, or of all pages, of a running request, each [layers, tokens, heads, head_dim]."""
    runtime, layout = engine._runtime, engine.describe().layout
    residency = runtime.scheduler.residency
    pages = residency.request_map.pages_of(residency.handle_of(request).row)
    rows = np.arange(layout.num_layers)[:, None] * layout.num_pages + pages
    return [
        np.asarray(pool)[rows].reshape(layout.num_layers, -1, *pool.shape[2:])[:, :tokens]
        for pool in runtime.state.pools
    ]


@pytest.mark.parametrize("provider", ["native", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_hold_bit_for_bit_what_single_steps_write(provider, dtype, dispatched):
    written = {}
    for bursts in (False, True):
        engine = engine_of(bursts=bursts, model=golden_model("llama", dtype), provider=provider)
        run = Run(engine)
        requests = [run.submit(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in PROMPTS]
        run.until(lambda run=run: min(map(len, run.outputs.values())) > 25)
        written[bursts] = [
            kv_of(engine, each, len(prompt) + 25) for each, prompt in zip(requests, PROMPTS, strict=True)
        ]
    assert max(dispatched) == 8
    for single, burst in zip(written[False], written[True], strict=True):
        for ours, theirs in zip(single, burst, strict=True):
            assert np.isfinite(ours.astype(np.float32)).all()
            assert ours.tobytes() == theirs.tobytes()


def test_a_page_that_a_burst_opens_is_cleared_of_what_was_there(dispatched):
    engine = engine_of(bursts=True, prefix_cache=False, pages=8)
    engine.generate([np.arange(100)], SamplingParams(max_tokens=2, ignore_eos=True))  # leaves NaN behind
    run = Run(engine)
    request = run.submit([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
    run.until(lambda: len(run.outputs[request]) >= 40)
    assert max(dispatched) == 8
    for whole_pages in kv_of(engine, request, None):
        assert np.isfinite(whole_pages).all()
    run.to_end()


@pytest.mark.parametrize("provider", ["native", "reference"])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3", "qwen3_moe"])
def test_rows_that_share_a_prefix_decode_in_bursts_as_in_single_steps(name, provider, dispatched):
    model = golden_model(name, "bfloat16" if provider == "native" else "float32")
    single, bursts = both(GREEDY, model=model, provider=provider, tokens_per_page=8, prompts=[*PROMPTS, PROMPTS[0]])
    assert tokens_of(bursts) == tokens_of(single)
    assert bursts[1].cached_tokens == single[1].cached_tokens == 40
    assert max(dispatched) == 8


def test_fewer_programs_are_started_for_as_many_steps(dispatched):
    engine = engine_of(bursts=True)
    engine.generate(PROMPTS, GREEDY)
    assert sum(dispatched) == engine.stats().steps > 2 * len(dispatched)
    dispatched.clear()
    single = engine_of(bursts=False)
    single.generate(PROMPTS, GREEDY)
    assert len(dispatched) == single.stats().steps == engine.stats().steps


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_short_answers_are_as_long_as_asked_for(max_tokens, dispatched):
    single, bursts = both(SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert bursts == single
    assert [len(result.tokens) for result in bursts] == [max_tokens] * 3
    assert {result.finish_reason for result in bursts} == {"length"}
    assert (max(dispatched) > 1) == (max_tokens > 2)


def test_a_stop_at_any_step_of_a_burst_ends_its_request_as_it_does_in_single_steps(dispatched):
    (whole,) = engine_of(bursts=False).generate(PROMPTS[:1], GREEDY)
    engines = {bursts: engine_of(bursts=bursts) for bursts in (False, True)}
    for stop in dict.fromkeys(whole.tokens):
        params = [SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)), GREEDY]
        single, bursts = (engine.generate(PROMPTS[:2], params) for engine in engines.values())
        assert bursts[0].finish_reason == "stop"
        assert [each._replace(cached_tokens=0) for each in bursts] == [
            each._replace(cached_tokens=0) for each in single
        ]
        assert engines[True].stats().pages_in_use == 0
    assert max(dispatched) == 8


def test_pages_of_one_token_make_no_bursts(dispatched):
    single, bursts = both(GREEDY, tokens_per_page=1)
    assert tokens_of(bursts) == tokens_of(single)
    assert set(dispatched) == {1}


class OddTokens:
    """Allows tokens of odd ids only."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.full(10, 0xAAAAAAAA, np.uint32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


BESIDE = {
    "random": {"temperature": 1.0, "seed": 1},
    "log-probabilities": {"logprobs": True},
    "bias": {"logit_bias": {7: 2.0}},
    "least tokens": {"min_tokens": 3},
    "constraint": {},
}


@pytest.mark.parametrize("beside", BESIDE)
def test_beside_one_that_asks_for_more_steps_are_single_and_then_bursts_go_on(beside, dispatched):
    asked, tokens = SamplingParams(max_tokens=6, ignore_eos=True, **BESIDE[beside]), {}
    for bursts in (False, True):
        run = Run(engine_of(bursts=bursts))
        first = run.submit(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
        run.until(lambda run=run, first=first: len(run.outputs[first]) >= 10)
        assert dispatched[-1] == (8 if bursts else 1)
        dispatched.clear()
        constraint = OddTokens() if beside == "constraint" else None
        late = run.submit(PROMPTS[1], asked, constraint=constraint)
        run.until(lambda run=run, late=late: len(run.outputs[late]) == 6)
        assert set(dispatched) <= {1}
        run.to_end()
        assert max(dispatched) == (8 if bursts else 1)
        tokens[bursts] = run.tokens(first), run.tokens(late)
        if constraint is not None:
            assert tuple(constraint.accepted) == run.tokens(late)
            assert all(token % 2 for token in constraint.accepted)
    assert tokens[True] == tokens[False]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preemption_after_any_burst_changes_nothing(prefix_cache, dispatched):
    expected = tokens_of(engine_of(bursts=False).generate(PROMPTS[:2], GREEDY))
    engine = engine_of(bursts=True, prefix_cache=prefix_cache)
    for preempted_at in range(2, 8):
        run = Run(engine)
        requests = [run.submit(prompt) for prompt in PROMPTS[:2]]
        for _ in range(preempted_at):
            run.step()
        due = min(30, len(run.outputs[requests[0]]) + dispatched[-1])
        assert run.batcher.preempt(requests[0]) == run.batcher.is_waiting(requests[0])
        run.step()
        assert len(run.outputs[requests[0]]) == due, "what was on the device is lost"
        run.to_end()
        assert [run.tokens(request) for request in requests] == expected
    assert max(dispatched) == 8
    assert engine.stats().pages_in_use == 0


def test_a_pool_that_is_too_small_preempts_and_gives_the_same(dispatched):
    prompts = [prompt[35:] for prompt in PROMPTS]
    single, bursts = (
        engine_of(bursts=burst, pages=9, tokens_per_page=8, prefix_cache=False) for burst in (False, True)
    )
    assert tokens_of(bursts.generate(prompts, GREEDY)) == tokens_of(single.generate(prompts, GREEDY))
    assert bursts.stats().preemptions == single.stats().preemptions > 0
    assert max(dispatched) == 8


def test_an_abort_while_a_burst_is_on_the_device_frees_its_pages_for_another(dispatched):
    expected = tokens_of(engine_of(bursts=False).generate(PROMPTS, GREEDY))
    engine = engine_of(bursts=True, prefix_cache=False, max_requests=2)
    run = Run(engine)
    gone, stays = run.submit(PROMPTS[0]), run.submit(PROMPTS[1])
    run.until(lambda: dispatched[-1:] == [8])
    assert run.batcher.abort(gone)
    late = run.submit(PROMPTS[2])
    run.to_end()
    assert [run.tokens(stays), run.tokens(late)] == expected[1:]
    assert run.tokens(gone) == expected[0][: len(run.outputs[gone])]
    assert engine.stats().pages_in_use == 0


def test_held_requests_embeddings_and_scores_go_between_bursts(dispatched):
    single = engine_of(bursts=False)
    alone = [single.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]
    embedded, scored = single.embed([PROMPTS[1]]), single.score(PROMPTS[0])
    engine = engine_of(bursts=True)
    run = Run(engine)
    queued = run.submit(PROMPTS[1])
    held = engine.prefill_paged(PROMPTS[0], GREEDY)
    tokens = [held.token]
    while run.batcher.has_unfinished:
        run.step()
        tokens += [output.token for output in engine.generate_paged().values()]
        np.testing.assert_allclose(engine.embed([PROMPTS[1]]), embedded, atol=1e-5)
        np.testing.assert_allclose(engine.score(PROMPTS[0]), scored, atol=1e-5)
    assert run.tokens(queued) == alone[1]
    assert tuple(tokens) == alone[0][: len(tokens)]
    assert max(dispatched) == 8
    engine.release(held.handle)
    assert engine.stats().pages_in_use == 0


@pytest.mark.parametrize("provider", ["native", "reference"])
def test_a_request_whose_logits_are_nan_ends_within_a_burst_and_its_neighbor_goes_on(tmp_path, provider, dispatched):
    sound = engine_of(bursts=False).generate(PROMPTS[:2], GREEDY)
    damaged = next(each for each in sound[0].tokens[3:] if each not in [*sound[1].tokens, *np.concatenate(PROMPTS)])
    tensors = load_file(GOLDEN / "llama" / "model.safetensors")
    tensors["model.embed_tokens.weight"][damaged] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((GOLDEN / "llama" / "config.json").read_text())
    engine = engine_of(bursts=True, model=load_model(tmp_path), provider=provider)
    ended, other = engine.generate(PROMPTS[:2], GREEDY)
    assert (ended.tokens, ended.finish_reason) == (sound[0].tokens[: sound[0].tokens.index(damaged) + 1], "nan")
    assert (other.tokens, other.finish_reason) == (sound[1].tokens, "length")
    again = engine.generate(PROMPTS[:2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert tokens_of(again) == [each.tokens[:3] for each in sound[:2]], "what the damaged one cached is found"
    assert max(dispatched) == 8
    assert engine.stats().pages_in_use == 0
