"""After warm-up nothing compiles."""

import logging

import jax
import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, make_engine
from lora_files import write_adapter

from kv_execution import SamplingParams


def test_a_random_trace_after_warm_up_traces_and_compiles_nothing(caplog):
    engine = make_engine(golden_model("llama"), max_requests=3, max_step_tokens=24, pages=14, debug=True)
    shapes = engine.warmup_paged()
    assert shapes == engine.describe().shapes
    # One program of the network per shape, and per number of rows the greedy one, that of logits and the sampler.
    assert engine.stats().traces == len(shapes) + 3 * len({shape.rows for shape in shapes})
    traces = engine.stats().traces
    rng = np.random.default_rng(0)
    batcher = engine.batcher()
    submitted = 0
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        while submitted < 200 or batcher.has_unfinished:
            for _ in range(int(rng.integers(0, 4)) if submitted < 200 else 0):
                submitted += 1
                params = SamplingParams(
                    max_tokens=int(rng.integers(1, 36)),
                    temperature=float(rng.choice([0.0, 1.0])),
                    top_k=int(rng.choice([0, 5])),
                    top_p=float(rng.choice([1.0, 0.9])),
                    repetition_penalty=float(rng.choice([1.0, 1.2])),
                    presence_penalty=float(rng.choice([0.0, 0.5])),
                    logit_bias={int(rng.integers(320)): 1.0} if rng.integers(2) else {},
                    top_logprobs=int(rng.choice([0, 3])),
                    seed=int(rng.integers(1000)),
                )
                batcher.submit(rng.integers(0, 320, int(rng.integers(1, 90))), params)
            batcher.step()
    assert engine.stats().traces == traces
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []
    assert engine.stats().preemptions > 0, "the trace was meant to run out of pages"


def test_prompts_that_are_embedded_or_scored_leave_the_rest_as_warm_as_it_was(caplog):
    engine = make_engine(golden_model("llama"), max_requests=2, max_step_tokens=16)
    engine.warmup_paged(constrained=True)
    asked = [SamplingParams(max_tokens=4, ignore_eos=True, temperature=heat, seed=1) for heat in (0.0, 1.0)]
    engine.generate([[5, 6, 7]] * 2, asked)
    engine.embed([[5, 6, 7]])
    engine.score([5, 6, 7])
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        engine.generate([[5, 6, 7]] * 2, asked)
        engine.embed([[5, 6, 7]])
        engine.score([5, 6, 7])
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []


def test_warm_up_reports_each_shape_before_it_compiles():
    engine = make_engine(golden_model("llama"), max_requests=1, max_step_tokens=16)
    seen = []
    engine.warmup_paged(lambda done, shape: seen.append((done, shape)))
    assert seen == list(enumerate(engine.describe().shapes))


def test_warm_up_disturbs_no_request_that_is_running():
    engine = make_engine(golden_model("llama"))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = engine.generate([[5, 6, 7]], params)[0].tokens
    first = engine.prefill_paged([5, 6, 7], params)
    engine.warmup_paged()
    tokens = [first.token]
    while step := engine.generate_paged():
        tokens.append(step[first.handle].token)
    assert tuple(tokens) == expected


def test_prompts_of_several_adapters_share_nothing_and_that_is_foreseen(tmp_path):
    engine = make_engine(golden_model("llama"), max_step_tokens=64, max_adapters=2)
    for seed, name in enumerate("ab"):
        engine.adapters.load(name, write_adapter(tmp_path / name, GOLDEN / "llama", ("q_proj",), seed=seed))
    params = SamplingParams(max_tokens=1)
    prompts, names = [np.arange(3, 23)] * 3, ["a", "b", None]
    needed = engine.shapes_needed(prompts, [params] * 3, adapters=names)
    engine.generate(prompts, params, adapters=names)
    assert engine._runtime.counters.shapes == set(needed)
    assert needed != engine.shapes_needed(prompts, [params] * 3, adapters="a")  # of which the later ones wait for hits


@pytest.mark.parametrize("lengths", [(5,), (40,), (3, 3, 60), (20, 20, 20, 20)])
@pytest.mark.parametrize("max_tokens", [1, 2, 30])
def test_what_prompts_need_is_foreseen_and_no_more(lengths, max_tokens):
    model = golden_model("llama")
    engine = make_engine(model, max_step_tokens=32)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [np.arange(3, 3 + length) for length in lengths]
    needed = engine.shapes_needed(prompts, [params] * len(prompts))
    assert set(needed) <= set(engine.describe().shapes)
    engine.warmup_paged(shapes=needed, params=[params])
    traces = engine.stats().traces
    engine.generate(prompts, params)
    assert engine.stats().traces == traces
    assert engine._runtime.counters.shapes <= set(needed)
    if max_tokens == 1:
        assert engine._runtime.counters.shapes == set(needed)


def test_no_shape_is_longer_than_the_pool():
    settings = {"max_requests": 1, "max_step_tokens": 64, "max_context": 512}
    roomy = make_engine(golden_model("llama"), pages=40, **settings).describe()
    assert max(shape.max_seqlen_k for shape in roomy.shapes) == 512
    engine = make_engine(golden_model("llama"), pages=15, **settings)
    plan = engine.describe()
    assert (plan.max_context, max(shape.max_seqlen_k for shape in plan.shapes)) == (512, 256)
    engine.warmup_paged()
    traces = engine.stats().traces
    full = plan.layout.usable_tokens
    (result,) = engine.generate([np.arange(full - 20) % 300], SamplingParams(max_tokens=21, ignore_eos=True))
    assert len(result.tokens) == 21
    assert engine.stats().traces == traces


def test_constraints_share_the_sampler_of_the_rest():
    engine = make_engine(golden_model("llama"), max_requests=2, max_step_tokens=8)
    shapes = engine.warmup_paged(constrained=True)
    # One program of the network per shape, and per number of rows the greedy one, logits, sampler and mask.
    assert engine.stats().traces == len(shapes) + 4 * len({shape.rows for shape in shapes})
