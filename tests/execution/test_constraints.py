"""Requests that are held to certain tokens: they keep to them, and nobody else notices."""

import numpy as np
import pytest
from engine_case import golden_model, golden_prompts, make_engine

from kv_execution import SamplingParams
from kv_execution.constraints import TokenConstraint

VOCAB = 320
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=12, ignore_eos=True, temperature=2.0, seed=3, logprobs=True)


class AfterLast(TokenConstraint):
    """Allows the 20 tokens after the last one, and keeps what it was told."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.asked: list[int] = []

    def eligible(self, position: int) -> list[int]:
        last = self.accepted[position - 1] if position else 10
        return [(last + step) % VOCAB for step in range(1, 21)]

    def allowed(self) -> np.ndarray:
        self.asked.append(len(self.accepted))
        bits = np.zeros(VOCAB, np.uint8)
        bits[self.eligible(len(self.accepted))] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def run(batcher, tokens):
    while batcher.has_unfinished:
        for output in batcher.step():
            tokens.setdefault(output.request_id, []).append(output.token)


@pytest.mark.parametrize("params", [GREEDY, RANDOM])
def test_a_constrained_request_keeps_to_its_tokens_and_the_others_to_theirs(params):
    engine = make_engine(golden_model("llama"), debug=True)
    prompts = golden_prompts("llama")
    alone = [result.tokens for result in engine.generate(prompts[1:], GREEDY)]
    batcher, tokens, constraint = engine.batcher(), {}, AfterLast()
    held = batcher.submit(prompts[0], params, constraint=constraint)
    others = [batcher.submit(prompt, GREEDY) for prompt in prompts[1:]]
    run(batcher, tokens)
    assert tokens[held] == constraint.accepted
    assert constraint.asked == list(range(12))  # once for each token, when all before it were known
    assert all(token in constraint.eligible(at) for at, token in enumerate(tokens[held]))
    assert [tuple(tokens[request_id]) for request_id in others] == alone
    assert engine.stats().pages_in_use == 0


def test_a_greedy_constrained_token_is_the_likeliest_that_is_allowed():
    engine = make_engine(golden_model("llama"))
    prompt = golden_prompts("llama")[0]
    constraint, tokens = AfterLast(), {}
    request_id = engine.batcher().submit(prompt, GREEDY, constraint=constraint)
    run(engine.batcher(), tokens)
    scores = engine.score([*prompt, *tokens[request_id]])
    for at, token in enumerate(tokens[request_id]):
        eligible = constraint.eligible(at)
        row = scores[len(prompt) - 1 + at]
        assert token == eligible[int(np.argmax(row[eligible]))]


def test_a_constrained_request_goes_on_where_it_was_preempted():
    engine = make_engine(golden_model("llama"))
    prompt = golden_prompts("llama")[0]
    results = []
    for preempt_at in (None, 5):
        constraint, tokens = AfterLast(), {}
        batcher = engine.batcher()
        request_id = batcher.submit(prompt, RANDOM, constraint=constraint)
        step = 0
        while batcher.has_unfinished:
            step += 1
            if step == preempt_at:
                assert batcher.preempt(request_id)
            for output in batcher.step():
                tokens.setdefault(output.request_id, []).append(output.token)
        results.append(tokens[request_id])
        assert constraint.accepted == tokens[request_id]
    assert results[0] == results[1]


def test_a_request_that_ends_while_the_next_step_waits_for_its_token_leaves_nothing():
    engine = make_engine(golden_model("llama"), debug=True)
    prompt = golden_prompts("llama")[0]
    constraint, tokens = AfterLast(), {}
    request_id = engine.batcher().submit(prompt, GREEDY, constraint=constraint)
    run(engine.batcher(), tokens)
    stop = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[request_id][4],))
    again = {}
    other = engine.batcher().submit(prompt, stop, constraint=AfterLast())
    run(engine.batcher(), again)
    assert again[other] == tokens[request_id][: len(again[other])]
    assert again[other][-1] == tokens[request_id][4]
    assert engine.stats().pages_in_use == 0


def test_nothing_compiles_after_a_warm_up_for_constraints():
    engine = make_engine(golden_model("llama"), max_requests=2, max_step_tokens=4, max_context=32)
    engine.warmup_paged(constrained=True)
    traces = engine.stats().traces
    batcher, tokens = engine.batcher(), {}
    batcher.submit([1, 2, 3], RANDOM, constraint=AfterLast())
    batcher.submit([1, 2, 3], GREEDY)
    run(batcher, tokens)
    assert engine.stats().traces == traces


def test_min_tokens_holds_stop_tokens_back_whatever_their_bias():
    engine = make_engine(golden_model("llama"))
    stop = 7
    params = SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=(stop,), logit_bias={stop: 100.0})
    (result,) = engine.generate([golden_prompts("llama")[0]], params)
    assert stop not in result.tokens[:5]
    assert result.tokens[5] == stop
    assert result.finish_reason == "stop"
