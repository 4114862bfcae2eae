"""What the K/V memory held during each step, and what that says about how it is dealt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kv_execution import PagedEngine


class StepSample(NamedTuple):
    """One call of `Batcher.step`, from `begin_s` to `end_s`, and what was held when it returned.

    `pages_held` are in the hands of requests, each counted once however many share it; `cached_pages` in those of the
    prefix cache alone. `tokens_held` counts the K/V tokens of every running request, shared or not. `computed_tokens`
    is the total so far.
    """

    begin_s: float
    end_s: float
    pages_held: int
    cached_pages: int
    tokens_held: int
    running: int
    waiting: int
    computed_tokens: int

    @property
    def duration_s(self) -> float:
        """Seconds that the step took."""
        return self.end_s - self.begin_s


def observe(engine: PagedEngine, begin_s: float, end_s: float) -> StepSample:
    """The state of `engine` after a step."""
    stats = engine.stats()
    # How far each request has come is the scheduler's own knowledge: the engine's statistics do not carry it.
    scheduler = engine._require_runtime().scheduler
    live = scheduler.residency.request_map.live
    return StepSample(
        begin_s=begin_s,
        end_s=end_s,
        pages_held=stats.pages_in_use,
        cached_pages=stats.cached_pages,
        tokens_held=int(scheduler.running.kv_len[live].sum()),
        running=stats.running,
        waiting=stats.waiting,
        computed_tokens=stats.prefill_tokens + stats.decode_tokens,
    )


def page_overhead(samples: Sequence[StepSample], tokens_per_page: int) -> float:
    """Token slots in held pages over tokens held, both summed over steps; 0 where nothing was ever held.

    1 is no waste. Below 1 is a sharing dividend: pages that several requests hold are there once.
    """
    tokens = sum(sample.tokens_held for sample in samples)
    return tokens_per_page * sum(sample.pages_held for sample in samples) / tokens if tokens else 0.0


def mean_running(samples: Sequence[StepSample]) -> float:
    """Requests that ran at once, on average over the time that the engine was busy."""
    busy_s = sum(sample.duration_s for sample in samples)
    return sum(sample.running * sample.duration_s for sample in samples) / busy_s


def waiting_share(samples: Sequence[StepSample], total_e2e_s: float) -> float:
    """The part of all requests' time, `total_e2e_s` together, that they spent in the queue."""
    return sum(sample.waiting * sample.duration_s for sample in samples) / total_e2e_s
