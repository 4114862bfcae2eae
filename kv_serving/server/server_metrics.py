"""Prometheus metrics of the server, under the names of vLLM's with the prefix `jaxkv:`.

Counts of the engine are read from its last snapshot when they are scraped, so that steps pay nothing for them.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kv_serving.server.request_group import RequestGroup

if TYPE_CHECKING:
    from kv_serving.server.engine_snapshot import EngineSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_TOKENS = tuple(2.0**power for power in range(0, 18))


class ServerMetrics:
    """What one server counts; `snapshot` gives the engine's counts, or None while there is no engine."""

    def __init__(self, snapshot: Callable[[], "EngineSnapshot | None"]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(snapshot))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"jaxkv:{name}", text, buckets=buckets, registry=registry)

        self._first_token = histogram("time_to_first_token_seconds", "Submission to first token.", _SECONDS)
        self._between_tokens = histogram("inter_token_latency_seconds", "Token to token.", _TOKEN_SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "Submission to last token.", _SECONDS)
        self._queued = histogram("request_queue_time_seconds", "Submission to first step.", _SECONDS)
        self._prompt_sizes = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_sizes = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._generated = Counter("jaxkv:generation_tokens", "Tokens generated.", registry=registry)
        self._prompted = Counter("jaxkv:prompt_tokens", "Tokens of prompts.", registry=registry)
        self._finished = Counter("jaxkv:request_success", "Answers that ended.", ["finished_reason"], registry=registry)
        self._responses = Counter(
            "jaxkv:http_requests", "Requests over HTTP.", ["method", "path", "status"], registry=registry
        )

    def prompt(self, tokens: int) -> None:
        """A prompt was taken."""
        self._prompted.inc(tokens)
        self._prompt_sizes.observe(tokens)

    def token(self, group: RequestGroup, last_s: float | None, now_s: float) -> None:
        """A token came; `last_s` is when the one before it did."""
        self._generated.inc()
        if last_s is not None:
            self._between_tokens.observe(now_s - last_s)
            return
        self._first_token.observe(now_s - group.submitted_s)
        if group.started_s is not None:
            self._queued.observe(group.started_s - group.submitted_s)

    def finished(self, group: RequestGroup, reason: str, last_s: float | None, tokens: int) -> None:
        """An answer ended."""
        self._finished.labels(reason).inc()
        self._answer_sizes.observe(tokens)
        if last_s is not None:
            self._whole.observe(last_s - group.submitted_s)

    def aborted(self, choices: int) -> None:
        """Answers ended that nobody waits for."""
        self._finished.labels("abort").inc(choices)

    def response(self, method: str, path: str, status: int) -> None:
        """A request over HTTP was answered; `path` is a route's, so that there are few."""
        self._responses.labels(method, path, str(status)).inc()

    def exposition(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector:
    """The engine's own counts, when asked."""

    def __init__(self, snapshot: Callable[[], "EngineSnapshot | None"]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        if snapshot is None:
            return
        stats, prefix = snapshot
        pages = stats.pages_in_use + stats.free_pages + stats.cached_pages
        for name, text, value in (
            ("num_requests_running", "Requests that hold a row.", stats.running),
            ("num_requests_waiting", "Requests in the queue.", stats.waiting),
            ("kv_cache_usage_perc", "Fraction of the pages that requests hold.", stats.pages_in_use / max(1, pages)),
            ("kv_cache_pages_in_use", "Pages that requests hold.", stats.pages_in_use),
            ("kv_cache_pages_cached", "Pages that the prefix cache alone holds.", stats.cached_pages),
            ("kv_cache_pages_free", "Pages that nobody holds.", stats.free_pages),
        ):
            yield GaugeMetricFamily(f"jaxkv:{name}", text, value=value)
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", prefix.asked_tokens),
            ("prefix_cache_hits", "Tokens found there.", prefix.hit_tokens),
            ("num_preemptions", "Requests that lost their pages for a while.", stats.preemptions),
            ("engine_steps", "Steps.", stats.steps),
            ("engine_prefill_tokens", "Tokens computed in chunks.", stats.prefill_tokens),
            ("engine_decode_tokens", "Tokens computed one by one.", stats.decode_tokens),
            ("compilations", "Programs traced.", stats.traces),
        ):
            yield CounterMetricFamily(f"jaxkv:{name}", text, value=value)
