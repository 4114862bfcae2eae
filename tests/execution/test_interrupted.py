"""A step that is cut off makes the engine say so; it never yields wrong tokens."""

import numpy as np
import pytest
from engine_case import golden_model, make_engine

from kv_common.errors import JaxkvError
from kv_execution import EngineConfig, EngineConfigError, InterruptedStepError, PagedEngine, SamplingParams, pools
from kv_execution.runtime import PagedRuntime

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = np.arange(3, 40)


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("where", ["forward", "choose", "collect"])
def test_an_engine_whose_step_was_cut_off_refuses_work_until_it_starts_afresh(monkeypatch, where, step):
    engine = make_engine(golden_model("llama"), max_step_tokens=16)
    expected = engine.generate([PROMPT], GREEDY)[0].tokens
    engine.init_paged_runtime()
    original, calls = getattr(PagedRuntime, where), []

    def interrupted(self, *arguments):
        calls.append(where)
        if len(calls) == step:
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PagedRuntime, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT], GREEDY)
    for work in (
        lambda: engine.generate([PROMPT], GREEDY),
        lambda: engine.prefill_paged(PROMPT, GREEDY),
        lambda: engine.batcher().submit(PROMPT, GREEDY),
        lambda: engine.score(PROMPT),
    ):
        with pytest.raises(InterruptedStepError, match="call init_paged_runtime"):
            work()
    engine.init_paged_runtime()
    assert engine.generate([PROMPT], GREEDY)[0].tokens == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 2**70}, "priority is"),
        ({"priority": 1.5}, "priority is 1.5"),
        ({"priority": float("nan")}, "priority is nan"),
        ({"deadline_s": "x"}, "deadline_s is 'x'"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"deadline_s": -1}, "deadline_s is -1"),
        ({"cache_salt": 7}, "cache_salt is a int"),
    ],
)
def test_a_bad_option_is_refused_and_nothing_is_queued(options, message):
    engine = make_engine(golden_model("llama"))
    batcher = engine.batcher()
    with pytest.raises(JaxkvError, match=message):
        batcher.submit([1, 2], GREEDY, **options)
    assert engine.stats().waiting == 0
    assert not batcher.has_unfinished


@pytest.mark.parametrize("params", ["x", {"max_tokens": 3}, 5])
def test_parameters_of_another_type_are_named(params):
    with pytest.raises(JaxkvError, match="give SamplingParams"):
        make_engine(golden_model("llama")).batcher().submit([1], params)


def test_lists_within_a_prompt_are_named():
    with pytest.raises(JaxkvError, match="got lists within a list"):
        make_engine(golden_model("llama")).batcher().submit([[1, 2], [3]], GREEDY)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_context": 10.5},
        {"max_context": "abc"},
        {"max_context": 1},
        {"max_waiting": "x"},
        {"max_waiting": -1},
        {"kv_pool_bytes": True},
        {"kv_pool_bytes": 1e9},
        {"max_requests": 0},
        {"debug": "no"},
        {"max_requests": 64, "max_step_tokens": 32},
    ],
)
def test_a_bad_setting_is_refused_by_name(settings):
    with pytest.raises(EngineConfigError, match=next(reversed(settings))):
        EngineConfig(**settings)


def test_numpy_integers_are_whole_numbers():
    assert EngineConfig(kv_pool_bytes=np.int64(1 << 20)).kv_pool_bytes == 1 << 20


def test_a_pool_larger_than_memory_is_one_line(monkeypatch):
    monkeypatch.setattr(pools, "_physical_memory_bytes", lambda: 1 << 20)
    engine = PagedEngine(golden_model("llama"), EngineConfig(kv_pool_bytes=1 << 21, max_context=64))
    with pytest.raises(JaxkvError, match=r"do not fit this machine's 1048576 bytes of memory; lower kv_pool_bytes"):
        engine.init_paged_runtime()
