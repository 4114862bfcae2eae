"""Traces: one span a request, with the names of the GenAI conventions and without any text."""

import contextlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from patience import HANG_S, wait_for
from server_case import running_server

from kv_serving import cli
from kv_serving.server import run as server_run
from kv_serving.server import traces
from kv_serving.server.traces import Traces, TracesError, endpoint_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FACTS = {
    "request_id": "mine",
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "duration_s": 1.5,
    "client": "127.0.0.1",
    "model": "tiny",
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "cached_tokens": 0,
    "finish_reasons": ["stop"],
    "queue_s": 0.25,
    "first_token_s": 0.5,
    "e2e_s": None,
}


def spans_of(*noted: tuple[dict[bytes, bytes], dict[str, Any]]) -> Any:
    exporter = InMemorySpanExporter()
    noting = Traces("http://127.0.0.1:1", exporter)
    for headers, facts in noted:
        noting.note(headers, facts)
    noting.close(HANG_S)
    return exporter.get_finished_spans()


def test_a_span_has_the_names_of_the_conventions_and_continues_the_client_s() -> None:
    headers = {b"traceparent": f"00-{TRACE}-{PARENT}-01".encode(), b"authorization": b"Bearer secret"}
    (span,) = spans_of((headers, FACTS))
    assert (span.name, span.kind, span.status.status_code) == ("chat tiny", SpanKind.SERVER, StatusCode.UNSET)
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxkv",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.end_time - span.start_time == 1_500_000_000
    assert span.resource.attributes["service.name"] == "jaxkv"


@pytest.mark.parametrize("parent", [b"", b"nonsense", b"00-\xff\xfe-00-01", f"00-{TRACE}-{'0' * 16}-01".encode()])
def test_a_traceparent_that_is_none_begins_a_new_trace(parent: bytes) -> None:
    (span,) = spans_of(({b"traceparent": parent}, FACTS))
    assert span.parent is None


def test_a_client_that_does_not_sample_gets_no_span() -> None:
    assert not spans_of(({b"traceparent": f"00-{TRACE}-{PARENT}-00".encode()}, FACTS))


@pytest.mark.parametrize(
    ("facts", "error", "status"),
    [
        ({"status": 400}, "400", StatusCode.UNSET),
        ({"status": 499}, "499", StatusCode.UNSET),
        ({"status": 503}, "503", StatusCode.ERROR),
        ({"status": 200, "error": "internal_error"}, "internal_error", StatusCode.ERROR),
    ],
)
def test_what_failed_says_why(facts: dict[str, Any], error: str, status: StatusCode) -> None:
    (span,) = spans_of(({}, {**FACTS, **facts}))
    assert (span.attributes["error.type"], span.status.status_code) == (error, status)


def test_only_work_of_the_model_has_spans() -> None:
    assert not spans_of(*(({}, {**FACTS, "path": path}) for path in ("/health", "/metrics", "/v1/models", "other")))


def test_an_endpoint_without_a_path_gets_the_usual_one() -> None:
    assert endpoint_of("http://host:4318") == endpoint_of("http://host:4318/") == "http://host:4318/v1/traces"
    assert endpoint_of("https://host/otlp/traces?key=1") == "https://host/otlp/traces?key=1"
    for url in ("host:4318", "grpc://host:4317", "http://", ""):
        with pytest.raises(TracesError, match="give a URL, as http:"):
            endpoint_of(url)


def test_a_bad_endpoint_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "nowhere", "--otlp-traces-endpoint", "collector"]) == 2
    assert capsys.readouterr().err == (
        "jaxkv: the endpoint of traces is 'collector': give a URL, as http://127.0.0.1:4318/v1/traces\n"
    )


def exporters() -> list[threading.Thread]:
    """The threads that send spans, or wait until they are sent."""
    return [each for each in threading.enumerate() if each.name.startswith("OtelBatch") or "(shutdown)" in each.name]


@pytest.fixture
def _all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector, and whoever waits for it when the server leaves, have as long as they need."""
    monkeypatch.setattr(traces, "EXPORT_S", HANG_S)
    monkeypatch.setattr(server_run, "LEAVE_S", HANG_S)


@contextlib.contextmanager
def collector(answers: threading.Event | None = None) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A local collector: its URL, and the paths and bodies that it was sent. It `answers` nobody before it is set."""
    got: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            if answers is not None:
                answers.wait(HANG_S)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.usefixtures("_all_the_time")
def test_a_collector_gets_the_spans_of_a_server_and_no_text(tmp_path: Path) -> None:
    with collector() as (url, got), running_server(tmp_path, otlp_traces_endpoint=endpoint_of(url)) as case:
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        case.post(
            "/v1/chat/completions",
            headers=parent,
            messages=[{"role": "user", "content": "the unspeakable secret"}],
            max_tokens=5,
            temperature=0.5,
            seed=1,
            n=2,
        )
        case.stream("/v1/completions", prompt="the unspeakable secret", max_tokens=1)
        case.post("/v1/embeddings", input="the unspeakable secret")
        case.post("/v1/completions", 404, prompt="the unspeakable secret", model="other")
        case.http.get("/health")
    assert {path for path, _ in got} == {"/v1/traces"}
    assert not any(b"unspeakable" in body for _, body in got)
    spans = [
        span
        for _, body in got
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    named = {span.name: {each.key: each.value for each in span.attributes} for span in spans}
    assert sorted(named) == ["chat tiny", "embeddings tiny", "text_completion", "text_completion tiny"]
    chat = named["chat tiny"]
    assert {span.trace_id.hex() for span in spans if span.name == "chat tiny"} == {TRACE}
    assert chat["gen_ai.usage.output_tokens"].int_value == 10
    assert chat["gen_ai.request.temperature"].double_value == 0.5
    assert [each.string_value for each in chat["gen_ai.response.finish_reasons"].array_value.values] == ["length"] * 2
    latencies = [
        chat[f"gen_ai.latency.{each}"].double_value for each in ("time_in_queue", "time_to_first_token", "e2e")
    ]
    assert 0 <= latencies[0] <= latencies[1] <= latencies[2]
    assert named["embeddings tiny"]["gen_ai.usage.input_tokens"].int_value > 0
    assert named["text_completion"]["error.type"].string_value == "404"


def test_a_collector_that_is_silent_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "EXPORT_S", HANG_S)
    answers = threading.Event()
    with collector(answers) as (url, got):
        with running_server(tmp_path, otlp_traces_endpoint=endpoint_of(url)) as case:
            for _ in range(3):
                case.post("/v1/completions", prompt=[5, 6, 7], max_tokens=3)
        assert exporters(), "the server is gone, and who sends its spans still waits"
        wait_for(lambda: got)
        answers.set()
        wait_for(lambda: not exporters())


def test_a_collector_that_is_away_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "EXPORT_S", 0.1)
    with running_server(tmp_path, otlp_traces_endpoint="http://127.0.0.1:1/v1/traces") as case:
        case.post("/v1/completions", prompt=[5, 6, 7], max_tokens=3)
    wait_for(lambda: not exporters())


def test_without_an_endpoint_neither_sdk_nor_exporter_is_imported() -> None:
    # fastapi itself looks for the bare API.
    code = (
        "import sys; import kv_serving.serve_command, kv_serving.server.run, kv_serving.server.app;"
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
