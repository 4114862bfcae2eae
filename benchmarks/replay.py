"""One pass of a workload through an engine, on the wall clock, and everything that it showed.

Open loop: a request is submitted as soon as its time has come, whatever the engine is doing, and what it waited is
counted from its arrival even where the engine was in the middle of a step. Every request generates exactly the tokens
it asks for, so that passes and arms do the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from compilations import CompilationCounter
from latency import RequestTimes
from occupancy import StepSample, observe
from workloads import TraceRequest

from kv_control.prefix_values import MissReason
from kv_execution import PagedEngine, SamplingParams
from kv_execution.engine import EngineStats


class Counts(NamedTuple):
    """What the engine did during the pass. `leaked_pages` are held at the end by neither a request nor the cache."""

    steps: int
    computed_tokens: int
    hit_tokens: int
    misses: Mapping[MissReason, int]
    evictions: int
    preemptions: int
    traces: int
    compilations: int
    shapes_used: int
    leaked_pages: int


class Replay(NamedTuple):
    """`requests` and their `tokens` in the order of the workload; `samples` by step; `duration_s` to the last token."""

    requests: tuple[RequestTimes, ...]
    tokens: tuple[tuple[int, ...], ...]
    samples: tuple[StepSample, ...]
    duration_s: float
    counts: Counts


def replay(
    engine: PagedEngine,
    requests: Sequence[TraceRequest],
    *,
    on_progress: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    observe: Callable[[PagedEngine, float, float], StepSample] = observe,
) -> Replay:
    """Run `requests`, which are in order of arrival, on an engine that does nothing else.

    `on_progress` is called with the number of requests that have ended. Raises what `Batcher.submit` raises.
    """
    batcher = engine.batcher()
    stats, prefix = engine.stats(), engine.prefix_statistics()
    index_of: dict[int, int] = {}
    times: list[list[float]] = [[] for _ in requests]
    tokens: list[list[int]] = [[] for _ in requests]
    samples: list[StepSample] = []
    arrived = ended = 0
    with CompilationCounter() as compiled:
        start = clock()
        while arrived < len(requests) or batcher.has_unfinished:
            begin = clock() - start
            while arrived < len(requests) and requests[arrived].arrival_s <= begin:
                request = requests[arrived]
                params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
                index_of[batcher.submit(request.prompt, params)] = arrived
                arrived += 1
            if not batcher.has_unfinished:
                sleep(requests[arrived].arrival_s - begin)
                continue
            outputs = batcher.step()
            end = clock() - start
            for output in outputs:
                index = index_of[output.request_id]
                assert output.token is not None  # no request here has a deadline
                times[index].append(end)
                tokens[index].append(output.token)
                ended += output.finish_reason is not None
            samples.append(observe(engine, begin, end))
            if on_progress is not None:
                on_progress(ended)
    after, prefix_after = engine.stats(), engine.prefix_statistics()
    return Replay(
        requests=tuple(RequestTimes(request.arrival_s, tuple(at)) for request, at in zip(requests, times, strict=True)),
        tokens=tuple(map(tuple, tokens)),
        samples=tuple(samples),
        duration_s=max(at[-1] for at in times),
        counts=Counts(
            steps=after.steps - stats.steps,
            computed_tokens=_computed(after) - _computed(stats),
            hit_tokens=prefix_after.hit_tokens - prefix.hit_tokens,
            misses={reason: count - prefix.misses.get(reason, 0) for reason, count in prefix_after.misses.items()},
            evictions=prefix_after.evictions - prefix.evictions,
            preemptions=after.preemptions - stats.preemptions,
            traces=after.traces - stats.traces,
            compilations=compiled.count,
            shapes_used=after.shapes_used,
            leaked_pages=engine.describe().layout.usable_pages - after.free_pages - after.cached_pages,
        ),
    )


def _computed(stats: EngineStats) -> int:
    return stats.prefill_tokens + stats.decode_tokens
