"""The replay is open loop: what a request waited counts from its arrival, whatever the engine was doing."""

from types import SimpleNamespace

import pytest
from occupancy import StepSample
from replay import replay
from workloads import TraceRequest

from kv_control.prefix_values import MissReason, PrefixStatistics
from kv_execution import EngineStats, TokenOutput


class FakeEngine:
    """An engine and its batcher on a virtual clock: a step takes a second and gives every request a token."""

    def __init__(self):
        self.now = 100.0
        self.running = {}
        self.asked = []
        self.steps = 0
        self.leaked = 0

    def batcher(self):
        return self

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds

    def submit(self, prompt, params):
        self.asked.append((self.now - 100.0, params.ignore_eos))
        self.running[len(self.asked)] = params.max_tokens
        return len(self.asked)

    @property
    def has_unfinished(self):
        return bool(self.running)

    def step(self):
        self.steps += 1
        self.now += 1.0
        outputs = []
        for request_id in list(self.running):
            self.running[request_id] -= 1
            last = not self.running[request_id]
            outputs.append(TokenOutput(request_id, self.steps, 0.0, (), "length" if last else None, 0))
            if last:
                del self.running[request_id]
        return outputs

    def stats(self):
        zeros = dict.fromkeys(EngineStats._fields, 0)
        return EngineStats(**{**zeros, "steps": self.steps, "traces": 7, "free_pages": 10 - self.leaked})

    def prefix_statistics(self):
        return PrefixStatistics(self.steps, 0, 5 * self.steps, {MissReason.NONE: self.steps}, 0, 0, 0, 0)

    def describe(self):
        return SimpleNamespace(layout=SimpleNamespace(usable_pages=10))


def run(engine, requests, **settings):
    return replay(
        engine,
        requests,
        clock=engine.clock,
        sleep=engine.sleep,
        observe=lambda engine, begin, end: StepSample(begin, end, 0, 0, 0, len(engine.running), 0, 0),
        **settings,
    )


def test_a_request_that_arrives_during_a_step_has_waited_since_then():
    engine = FakeEngine()
    result = run(engine, [TraceRequest(0.0, (1,), 2), TraceRequest(0.25, (2,), 1)])
    # The second is submitted when the first step ends, at 1, and answered at 2.
    assert engine.asked == [(0.0, True), (1.0, True)]
    assert [request.token_s for request in result.requests] == [(1.0, 2.0), (2.0,)]
    assert result.requests[1].ttft_s == 1.75
    assert result.duration_s == 2.0
    assert result.tokens == ((1, 2), (2,))


def test_an_idle_engine_waits_for_the_next_arrival_and_takes_no_steps():
    engine = FakeEngine()
    result = run(engine, [TraceRequest(0.0, (1,), 1), TraceRequest(7.5, (2,), 1)])
    assert engine.asked[1] == (7.5, True)
    assert result.counts.steps == 2
    assert result.requests[1].ttft_s == 1.0
    assert [(sample.begin_s, sample.end_s) for sample in result.samples] == [(0.0, 1.0), (7.5, 8.5)]


def test_counts_are_those_of_the_pass_alone():
    engine = FakeEngine()
    run(engine, [TraceRequest(0.0, (1,), 3)])
    counts = run(engine, [TraceRequest(0.0, (1,), 2)]).counts
    assert (counts.steps, counts.hit_tokens, counts.misses) == (2, 10, {MissReason.NONE: 2})
    assert counts.leaked_pages == 0
    assert counts.traces == 0


def test_a_page_that_is_neither_free_nor_cached_at_the_end_has_leaked():
    engine = FakeEngine()
    engine.leaked = 3
    assert run(engine, [TraceRequest(0.0, (1,), 1)]).counts.leaked_pages == 3


def test_progress_counts_the_requests_that_have_ended():
    seen = []
    run(FakeEngine(), [TraceRequest(0.0, (1,), 1), TraceRequest(0.0, (1,), 2)], on_progress=seen.append)
    assert seen == [1, 2]


def test_what_jax_compiles_during_the_pass_is_counted():
    import jax

    class CompilingEngine(FakeEngine):
        def step(self):
            jax.jit(lambda x: x * 3 + self.steps)(1.0)
            return super().step()

    assert run(CompilingEngine(), [TraceRequest(0.0, (1,), 2)]).counts.compilations >= 2
    jax.jit(lambda x: x * 5)(1.0)
    assert run(FakeEngine(), [TraceRequest(0.0, (1,), 2)]).counts.compilations == 0


def test_a_request_that_the_engine_refuses_is_its_error():
    class RefusingEngine(FakeEngine):
        def submit(self, prompt, params):
            raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        run(RefusingEngine(), [TraceRequest(0.0, (1,), 2)])
