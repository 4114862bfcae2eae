"""How long requests waited for their tokens, and how many were served well.

Every time counts from the moment at which a request *arrived*, whether or not the engine was free to take it: a slow
engine makes its requests wait, it does not make them come later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

PERCENTILES = (50, 90, 99)


class RequestTimes(NamedTuple):
    """When a request arrived and when each of its tokens came, in seconds from the start; at least one token."""

    arrival_s: float
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies, one fewer than tokens."""
        return tuple(later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def mean_itl_s(self) -> float:
        """Mean inter-token latency; 0 for a request of one token, which waits for no second."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.token_s[-1] - self.arrival_s


class Slo(NamedTuple):
    """What a request has to meet to count as served well: time to first token, and mean inter-token latency."""

    ttft_s: float
    itl_s: float

    def is_met_by(self, times: RequestTimes) -> bool:
        """Whether both limits are kept."""
        return times.ttft_s <= self.ttft_s and times.mean_itl_s <= self.itl_s


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` percent of them do not exceed; 0 where there are none.

    By nearest rank, so that a percentile is a latency that somebody had.
    """
    if not values:
        return 0.0
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


def goodput(requests: Sequence[RequestTimes], slo: Slo, duration_s: float) -> float:
    """Requests per second that met `slo`."""
    return sum(map(slo.is_met_by, requests)) / duration_s
