"""OpenTelemetry traces: one span for each request that the model works on, under the names of the GenAI conventions.

Contract: a span is made when its request has ended, from what the log tells of it, and continues the client's
`traceparent`; it has no text of prompts or answers. Spans are sent by a thread of their own from a queue of bounded
size, so that a collector that is slow or away costs spans and never a request. Nothing of OpenTelemetry is imported
where no endpoint is given. What it reads from the environment itself (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_TRACES_SAMPLER, and more) is its own.
"""

import os
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kv_common import __version__
from kv_common.errors import JaxkvError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_S = 5
"""How long a collector has for one export."""

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/classify": "classify",
}
"""Operation by route; other requests have no span."""

ATTRIBUTES = {
    "request_id": "gen_ai.request.id",
    "path": "http.route",
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "queue_s": "gen_ai.latency.time_in_queue",
    "first_token_s": "gen_ai.latency.time_to_first_token",
    "e2e_s": "gen_ai.latency.e2e",
}
"""Names in spans by those in the log; the latencies, in seconds, have vLLM's."""


class TracesError(JaxkvError):
    """An endpoint that is no URL."""


def endpoint_of(url: str) -> str:
    """A collector's URL of OTLP over HTTP, whose path is `/v1/traces` where it has none. Raises TracesError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise TracesError(f"the endpoint of traces is {url!r}: give a URL, as http://127.0.0.1:4318/v1/traces")
    return (parts._replace(path="/v1/traces") if parts.path in ("", "/") else parts).geturl()


class Traces:
    """The spans of one server."""

    def __init__(self, endpoint: str, exporter: "SpanExporter | None" = None) -> None:
        """Spans go to `endpoint`, see `endpoint_of`, or to `exporter`."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "jaxkv"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint, timeout=EXPORT_S)))
        self._tracer = self._provider.get_tracer("jaxkv", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def note(self, headers: Mapping[bytes, bytes], facts: Mapping[str, Any]) -> None:
        """A request with these `headers` has ended just now; `facts` is its line in the log."""
        operation = OPERATIONS.get(facts["path"])
        if operation is None:
            return
        attributes = {ATTRIBUTES[name]: facts[name] for name in ATTRIBUTES if facts.get(name) is not None}
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "jaxkv"}
        status = facts["status"]
        failed = facts.get("error") or (str(status) if status >= 400 else None)
        if failed:
            attributes["error.type"] = failed
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {facts['model']}" if "model" in facts else operation,
            self._propagator.extract(carrier),
            self._kind,
            attributes,
            start_time=ended_ns - round(facts["duration_s"] * 1e9),
        )
        if failed and not 400 <= status < 500:  # those are the client's
            span.set_status(self._failed)
        span.end(ended_ns)

    def close(self, timeout_s: float) -> None:
        """Send what is left, for so long at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)
