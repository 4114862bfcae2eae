"""Which burst programs are compiled, when they are used, over which weights, and what follows where one is cut off."""

import itertools

import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, golden_prompts, make_engine
from lora_files import write_adapter

from benchmarks.compilations import CompilationCounter
from kv_execution import EngineConfig, InterruptedStepError, PagedEngine, SamplingParams
from kv_execution.runtime import PagedRuntime
from kv_kernels.native import load_library
from models import load_model
from models.quantized_copy import quantize_checkpoint

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("max_requests", [1, 3, 6])
def test_a_random_trace_with_bursts_traces_and_compiles_nothing_after_warm_up(max_requests, dispatched):
    settings = {"max_step_tokens": 24, "max_context": 512, "pages": 34, "debug": True}
    engine = make_engine(golden_model("llama"), max_requests=max_requests, burst_s=1e9, **settings)
    before = engine.stats().traces
    shapes = engine.warmup_paged()
    decodes = [shape for shape in shapes if shape.tokens == shape.rows]
    assert len(decodes) > 1
    assert engine.stats().traces == before + len(shapes) + len(decodes) + 3 * len({shape.rows for shape in shapes})
    traces, rng, batcher, submitted = engine.stats().traces, np.random.default_rng(0), engine.batcher(), 0
    with CompilationCounter() as compilations:
        while submitted < 60 or batcher.has_unfinished:
            if submitted < 60 and rng.integers(40) == 0:
                submitted += 1
                params = SamplingParams(
                    max_tokens=int(rng.integers(1, 300)), temperature=float(rng.integers(4) == 0), seed=1
                )
                batcher.submit(rng.integers(0, 320, int(rng.integers(1, 90))), params)
            if batcher.has_unfinished:
                batcher.step()
    assert compilations.count == 0
    assert engine.stats().traces == traces
    assert len({shape for shape in engine._runtime.counters.shapes if shape in decodes}) > 1
    assert max(dispatched) == 8
    assert engine.stats().pages_in_use == 0


@pytest.mark.parametrize(("settings", "params"), [({"burst_s": 0.0}, None), ({"burst_s": 1e9}, "random")])
def test_no_burst_is_compiled_where_none_will_be_made(settings, params):
    engine = make_engine(golden_model("llama"), max_requests=2, max_step_tokens=16, max_context=64, **settings)
    before = engine.stats().traces
    asked = None if params is None else [SamplingParams(temperature=1.0)]
    shapes = engine.warmup_paged(params=asked)
    samplers = (3 if params is None else 2) * len({shape.rows for shape in shapes})
    assert engine.stats().traces - before == len(shapes) + samplers


@pytest.mark.parametrize("lengths", [(5,), (3, 3, 60), (20, 20, 20, 20)])
@pytest.mark.parametrize("max_tokens", [2, 30, 200])
def test_what_prompts_need_is_foreseen_with_bursts_too(lengths, max_tokens):
    engine = make_engine(golden_model("llama"), max_step_tokens=32, max_context=512, burst_s=1e9)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [np.arange(3, 3 + length) for length in lengths]
    needed = engine.shapes_needed(prompts, [params] * len(prompts))
    engine.warmup_paged(shapes=needed, params=[params])
    traces = engine.stats().traces
    with CompilationCounter() as compilations:
        engine.generate(prompts, params)
    assert (engine.stats().traces, compilations.count) == (traces, 0)


def test_adapters_are_those_of_their_rows_in_every_step_of_a_burst(tmp_path, dispatched):
    prompts, names, tokens = golden_prompts("llama")[:3], ["a", None, "b"], {}
    for burst_s in (0.0, 1e9):
        engine = make_engine(
            golden_model("llama"), max_adapters=2, max_adapter_rank=8, debug=True, burst_s=burst_s, tokens_per_page=8
        )
        for seed, name in enumerate("ab"):
            if name not in engine.adapters.names:
                path = write_adapter(
                    tmp_path / f"{name}{burst_s}", GOLDEN / "llama", ("q_proj", "down_proj"), seed=seed
                )
                engine.adapters.load(name, path)
        tokens[burst_s] = [result.tokens for result in engine.generate(prompts, GREEDY, adapters=names)]
    assert tokens[1e9] == tokens[0.0]
    assert len(set(engine.generate([prompts[0]] * 3, GREEDY, adapters=names))) == 3
    assert max(dispatched) == 8


@pytest.mark.skipif(not load_library().has_int8_products, reason="the native kernels of this CPU gain nothing by it")
def test_activations_of_eight_bits_give_the_same_in_bursts(tmp_path, dispatched):
    quantize_checkpoint(GOLDEN / "llama", tmp_path / "quantized", "q4_0")
    model = load_model(tmp_path / "quantized", dtype="bfloat16")
    single, bursts = (
        make_engine(model, provider="native", int8_activations=True, debug=True, burst_s=burst_s).generate(
            golden_prompts("llama"), GREEDY
        )
        for burst_s in (0.0, 1e9)
    )
    assert [result.tokens for result in bursts] == [result.tokens for result in single]
    assert max(dispatched) == 8


def engine_with_clock(tick: float, **settings) -> tuple[PagedEngine, list[float]]:
    """An engine whose clock goes on by `tick` seconds whenever it is read, and that clock."""
    now = [0.0]

    def clock() -> float:
        now[0] += tick
        return now[0]

    settings = {"max_requests": 2, "max_step_tokens": 64, "max_context": 128, "kv_pool_bytes": 1 << 20, **settings}
    engine = PagedEngine(golden_model("llama"), EngineConfig(debug=True, **settings), clock=clock)
    engine.init_paged_runtime()
    return engine, now


@pytest.mark.parametrize(("tick", "longest"), [(0.001, 8), (0.02, 8), (0.04, 1), (1.0, 1)])
def test_steps_that_take_long_are_made_one_by_one(tick, longest, dispatched):
    engine, _ = engine_with_clock(tick, burst_s=0.05)
    expected = make_engine(golden_model("llama")).generate([[5, 6, 7]], GREEDY)
    dispatched.clear()
    assert engine.generate([[5, 6, 7]], GREEDY) == expected
    assert max(dispatched) == longest  # at 0.02 s two steps, which take as long, and so then five, and then all


def test_after_an_idle_while_the_next_step_is_single(dispatched):
    engine, now = engine_with_clock(0.001, burst_s=0.05)
    batcher = engine.batcher()
    batcher.submit([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
    while 8 not in dispatched:
        batcher.step()
    now[0] += 3600.0
    batcher.step()
    dispatched.clear()
    batcher.step()
    assert dispatched == [1]
    batcher.step()
    batcher.step()
    assert max(dispatched) > 1


def test_a_deadline_that_passes_during_a_burst_ends_its_request_alone(dispatched):
    engine, now = engine_with_clock(0.0, burst_s=1e9)
    prompts = golden_prompts("llama")[:2]
    expected = [result.tokens for result in engine.generate(prompts, GREEDY)]
    engine.init_paged_runtime()
    batcher, outputs = engine.batcher(), {}
    timed, free = batcher.submit(prompts[0], GREEDY, deadline_s=5.0), batcher.submit(prompts[1], GREEDY)
    dispatched.clear()
    for step in itertools.count():
        if step == 4:
            assert dispatched[-1] == 8
            now[0] += 6.0
        for output in batcher.step():
            outputs.setdefault(output.request_id, []).append(output)
        if not batcher.has_unfinished:
            break
    assert outputs[timed][-1].finish_reason == "deadline"
    tokens = tuple(output.token for output in outputs[timed][:-1])
    assert 1 < len(tokens) < 30
    assert tokens == expected[0][: len(tokens)]
    assert tuple(output.token for output in outputs[free]) == expected[1]
    assert engine.stats().pages_in_use == 0


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("burst", [1, 2, 3])
def test_an_engine_whose_burst_was_cut_off_refuses_work_until_it_starts_afresh(monkeypatch, burst, late):
    prompts = golden_prompts("llama")[:3]
    engine = make_engine(golden_model("llama"), debug=True, burst_s=1e9)
    expected = [result.tokens for result in engine.generate(prompts, GREEDY)]
    engine.init_paged_runtime()
    original, calls = PagedRuntime._burst, itertools.count(1)

    def interrupted(self, plan):
        cut = next(calls) == burst
        step = original(self, plan) if late or not cut else None
        if cut:
            raise KeyboardInterrupt
        return step

    with monkeypatch.context() as patch:
        patch.setattr(PagedRuntime, "_burst", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, GREEDY)
    with pytest.raises(InterruptedStepError, match="call init_paged_runtime"):
        engine.generate(prompts, GREEDY)
    engine.init_paged_runtime()
    assert [result.tokens for result in engine.generate(prompts, GREEDY)] == expected
