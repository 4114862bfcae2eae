"""The server's life: loading, clients that go away, steps that fail, draining, and keys."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import uvicorn
from lora_files import write_adapter
from patience import HANG_S, reserved_port, wait_for
from server_case import ENGINE, Case, get, running_server
from tiny_model import GOLDEN, write_tiny_model

from kv_execution import SamplingParams
from kv_execution.runtime import PagedRuntime
from kv_serving import cli
from kv_serving.server.answer import Answer
from kv_serving.server.api_keys import ApiKeys
from kv_serving.server.completion_protocol import CompletionRequest
from kv_serving.server.engine_loop import EngineLoop
from kv_serving.server.guard import OPEN_PATHS
from kv_serving.server.limits import Limits
from kv_serving.server.request_group import EventChannel, RequestGroup
from kv_serving.server.run import Loaded, ServerSettings, listen, serve
from kv_serving.server.service import Service
from kv_serving.session import default_name
from models import CheckpointError

REPOSITORY = Path(__file__).resolve().parents[2]
LONG = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}


def json_of(line: str) -> Any:
    """The event of a line of a stream."""
    data = line.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with running_server(tmp_path_factory.mktemp("tiny"), limits=Limits(max_concurrent=6)) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages_within_one_step(
    case: Case, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    allowed, begun, aborted = threading.Semaphore(5), itertools.count(1), threading.Event()
    dispatch, abort = PagedRuntime.dispatch, EngineLoop.abort
    sixth = threading.Event()

    def when_allowed(self: PagedRuntime, plan: object) -> object:
        if next(begun) == 6:
            sixth.set()
        allowed.acquire()
        return dispatch(self, plan)  # type: ignore[arg-type]

    def told(self: EngineLoop, group: RequestGroup, choice: int | None = None) -> None:
        abort(self, group, choice)
        aborted.set()

    monkeypatch.setattr(PagedRuntime, "dispatch", when_allowed)
    monkeypatch.setattr(EngineLoop, "abort", told)
    body = b'{"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": true, "stream": %s}' % str(stream).lower().encode()
    address = case.server.url.removeprefix("http://").split(":")
    steps = case.stats.steps
    with socket.create_connection((address[0], int(address[1]))) as client:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        client.sendall(head % len(body) + body)
        assert sixth.wait(HANG_S)
        assert case.stats.pages_in_use > 0
    assert aborted.wait(HANG_S)
    allowed.release()
    case.settle()
    assert case.stats.steps == steps + 6


@pytest.mark.parametrize("where", ["forward", "choose", "collect"])
def test_a_step_that_raises_fails_what_it_touched_and_the_server_goes_on(
    case: Case, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = case.post("/v1/completions", **LONG)["choices"][0]["text"]
    original, steps = getattr(PagedRuntime, where), []

    def fail_once(self: PagedRuntime, *arguments: object) -> object:
        steps.append(where)
        if len(steps) == 10:
            raise RuntimeError("injected: a secret of the kernel")
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PagedRuntime, where, fail_once)
        error = case.post("/v1/completions", 500, **LONG)["error"]
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    case.settle()
    assert case.post("/v1/completions", **LONG)["choices"][0]["text"] == expected
    assert case.http.get("/health").status_code == 200


def test_requests_that_waited_go_on_after_a_step_that_raised(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.post("/v1/completions", **LONG)["choices"][0]["text"]
    original, submit, raised, begun, submitted = PagedRuntime.choose, EngineLoop.submit, [], itertools.count(), []

    def told(self: EngineLoop, group: RequestGroup) -> None:
        submit(self, group)
        submitted.append(group)

    def fail_once(self: PagedRuntime, *arguments: object) -> object:
        if next(begun) == 0:
            wait_for(lambda: len(submitted) == 6)
        if not raised and self.scheduler.num_waiting == 2 and self.scheduler.residency.num_running == 4:
            raised.append(1)
            raise RuntimeError("injected")
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedRuntime, "choose", fail_once)
    monkeypatch.setattr(EngineLoop, "submit", told)
    with ThreadPoolExecutor(6) as clients:  # where there are four rows
        ask = partial(case.http.post, "/v1/completions", json=LONG)
        answers = [each.result() for each in [clients.submit(ask) for _ in range(6)]]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 500, 500, 500, 500]
    waited = [answer.json() for answer in answers if answer.status_code == 200]
    assert [answer["choices"][0]["text"] for answer in waited] == [expected, expected]
    case.settle()


def test_logits_that_are_nan_fail_their_request_and_are_logged(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(case.engine._runtime, "params", jax.tree.map(lambda array: array * np.nan, case.model.params))
        error = case.post("/v1/completions", 500, **{**LONG, "prompt": [9, 8, 7]})["error"]
        case.settle()
    assert error["code"] == "internal_error"
    assert "the model's logits are not numbers" in caplog.text
    assert case.post("/v1/completions", **LONG)["choices"][0]["finish_reason"] == "length"


def test_a_failure_in_mid_stream_is_an_event(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    original, steps, begun = PagedRuntime.collect, [], threading.Event()

    def fail_late(self: PagedRuntime, step: object) -> object:
        steps.append(1)
        if len(steps) == 20:
            assert begun.wait(HANG_S)
            raise RuntimeError("injected")
        return original(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedRuntime, "collect", fail_late)
    with case.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        first = next(lines)
        begun.set()
        *chunks, last, done = [json_of(line) for line in (first, *lines) if line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert (last["error"]["type"], done) == ("server_error", "[DONE]")
    case.settle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_detokenizer_that_raises_fails_its_own_request_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    from models import StreamDecoder

    expected = case.post("/v1/completions", **LONG)["choices"][0]["text"]
    original, dispatch, piece_of = StreamDecoder.feed, PagedRuntime.dispatch, Answer._piece
    fed, steps, begun = [], itertools.count(1), threading.Event()

    def feed(self: StreamDecoder, ids: tuple[int, ...]) -> str:
        fed.append(self)
        if fed.count(fed[0]) == 5 and self is fed[0]:
            raise RuntimeError("injected")
        return original(self, ids)

    def once_it_has_begun(self: PagedRuntime, plan: object) -> object:
        if next(steps) == 5:
            assert begun.wait(HANG_S)
        return dispatch(self, plan)  # type: ignore[arg-type]

    def piece(self: Answer, number: int, choice: Any) -> object:
        if choice.assembly._decoder is fed[0]:
            begun.set()
        return piece_of(self, number, choice)

    monkeypatch.setattr(StreamDecoder, "feed", feed)
    monkeypatch.setattr(PagedRuntime, "dispatch", once_it_has_begun)
    monkeypatch.setattr(Answer, "_piece", piece)
    with ThreadPoolExecutor(3) as clients:
        ask = partial(case.http.post, "/v1/completions", json={**LONG, "stream": stream})
        answers = [each.result() for each in [clients.submit(ask) for _ in range(3)]]
    failed = [answer for answer in answers if "server_error" in answer.text]
    assert [answer.status_code for answer in failed] == [200 if stream else 500]
    assert "injected" not in failed[0].text
    for answer in answers:
        if answer not in failed:
            bodies = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if "{" in line]
            assert "".join(body["choices"][0]["text"] for body in bodies) == expected
    case.settle()


def test_too_many_at_once_are_told_when_to_come_back(case: Case) -> None:
    with contextlib.ExitStack() as others:
        for _ in range(6):
            others.enter_context(case.server.context.service.concurrency.hold(EventChannel()))
        response = case.http.post("/v1/completions", json=LONG)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_deadline_ends_an_answer_with_what_it_has_or_says_that_it_has_nothing(case: Case) -> None:
    case.post("/v1/completions", 408, deadline_s=1e-9, **LONG)
    case.settle()


def test_while_the_model_loads_the_port_answers_that_it_is_not_ready(tmp_path: Path) -> None:
    loaded = threading.Event()

    def load() -> Loaded:
        loaded.wait(HANG_S)
        raise CheckpointError("the weights are not there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda arguments: None)
        with running_server(tmp_path, load=load) as case:
            assert get(f"{case.server.url}/health")[0] == 200
            assert get(f"{case.server.url}/ready")[0] == 503
            response = case.http.post("/v1/completions", json=LONG)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "5"
            loaded.set()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Loaded:
        raise CheckpointError("the weights are not there")

    with pytest.raises(CheckpointError, match="the weights are not there"):
        serve(ServerSettings(name="x", port=0), load)
    assert [record.exc_info or None for record in caplog.records if record.levelname == "ERROR"] == [None]


def test_a_connection_that_idles_is_for_its_client_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[uvicorn.Config] = []

    def noted(*arguments: Any, **options: Any) -> uvicorn.Config:
        made.append(uvicorn_config(*arguments, **options))
        return made[0]

    uvicorn_config = uvicorn.Config
    monkeypatch.setattr(uvicorn, "Config", noted)
    with running_server(tmp_path):
        assert made[0].timeout_keep_alive > 60


def test_the_body_of_an_answer_does_not_wait_until_its_headers_are_acknowledged() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "options", [["--served-name=smol", "--adapter=smol=d"], ["--adapter=a=d", "--adapter=a=e"], ["--adapter=m.gguf=d"]]
)
def test_two_models_of_one_name_are_refused(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").touch()
    assert cli.run(["serve", str(tmp_path / "m.gguf"), *options]) == 2
    assert "choose another name" in capsys.readouterr().err


def test_a_group_of_processes_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.run(["serve", "nowhere", "--tp", "2", "--coordinator", "host:7777"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("jaxkv: --coordinator host:7777: a server is one process")
    monkeypatch.setenv("JAXKV_COORDINATOR", "host:7777")
    assert cli.run(["serve", "nowhere"]) == 2
    assert capsys.readouterr().err == told


def test_clients_call_a_model_by_its_own_name_without_folders(tmp_path: Path) -> None:
    assert default_name(f"{tmp_path}/") == tmp_path.name
    assert default_name("owner/name") == "owner/name"


def test_draining_lets_an_answer_end_and_takes_no_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, refused, dispatch = itertools.count(), threading.Event(), PagedRuntime.dispatch

    def at_its_time(self: PagedRuntime, plan: object) -> object:
        if next(begun) == 50:
            assert refused.wait(HANG_S)
        return dispatch(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedRuntime, "dispatch", at_its_time)
    with (
        running_server(tmp_path) as case,
        case.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        case.server.drain()
        wait_for(lambda: case.server.context.draining)
        status, _ = get(f"{case.server.url}/ready")
        assert status == 503
        refused.set()
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_when_the_time_to_drain_is_over_every_answer_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended, original, complete = threading.Event(), PagedRuntime.dispatch, Service.complete
    begun, sticks = itertools.count(), threading.Event()

    def dispatch(self: PagedRuntime, plan: object) -> object:
        if next(begun) == 20:
            assert ended.wait(HANG_S)
        return original(self, plan)  # type: ignore[arg-type]

    async def stuck(self: Service, request: CompletionRequest, tenant: str) -> object:
        if request.user:
            sticks.set()
            await asyncio.Event().wait()
        return await complete(self, request, tenant)

    monkeypatch.setattr(PagedRuntime, "dispatch", dispatch)
    monkeypatch.setattr(Service, "complete", stuck)
    with running_server(tmp_path, drain_s=0.1) as case, ThreadPoolExecutor(3) as clients:
        ask = partial(case.http.post, "/v1/completions")
        with case.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            whole, begins = (clients.submit(ask, json={**LONG, **more}) for more in ({}, {"user": "stuck"}))
            wait_for(lambda: case.server.context.active_requests == 2)
            assert sticks.wait(HANG_S)
            case.server.drain()
            *_, error, _, done, _ = lines
        assert done == "data: [DONE]"
        assert json_of(error)["error"]["code"] == "unavailable"
        for response in (whole.result(), begins.result()):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        ended.set()
    assert not [record for record in caplog.records if record.exc_info]


def test_no_salt_reaches_what_is_cached_for_another_key(tmp_path: Path) -> None:
    prompt = {"prompt": list(range(10, 80)), "max_tokens": 1}
    with running_server(tmp_path, api_keys=ApiKeys(["alpha", "alpha:x", "beta"])) as case:

        def cached(key: str, salt: str | None) -> int:
            answer = case.post("/v1/completions", headers={"authorization": f"Bearer {key}"}, cache_salt=salt, **prompt)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("alpha", None) == 0
        assert cached("alpha", "x:y") == 0
        assert cached("alpha", None) >= 64
        assert cached("alpha", "x:y") >= 64
        others = [
            ("alpha", ("y", "alpha")),
            ("alpha:x", (None, "y", "x:y")),
            ("beta", (None, "x:y", "alpha", "alpha:x:y")),
        ]
        assert [cached(key, salt) for key, salts in others for salt in salts] == [0] * 9


def test_what_needs_no_key_tells_nothing_of_a_request_or_a_tenant(tmp_path: Path) -> None:
    keys = ApiKeys(["alphakey"])
    with running_server(tmp_path, api_keys=keys) as case:
        secrets = [
            "alphakey",
            "saltysalt",
            "unspeakable",
            "requestname",
            "someuser",
            keys.tenant_of(b"Bearer alphakey"),
        ]
        headers = {"authorization": "Bearer alphakey", "x-request-id": "requestname"}
        asked = {"cache_salt": "saltysalt", "user": "someuser", "prompt": "unspeakable", "max_tokens": 2}
        case.post("/v1/completions", headers=headers, **asked)
        case.post("/v1/unspeakable", 404, headers=headers)
        for path in sorted(OPEN_PATHS):
            response = case.http.get(path)
            assert response.status_code == 200
            assert not [secret for secret in secrets if secret in response.text]
        assert len(OPEN_PATHS) == 6
        assert case.http.get("/openapi.json").status_code == 401


def test_an_engine_that_cannot_go_on_fails_whoever_waits_and_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with running_server(tmp_path) as case:

        def fail(*arguments: object) -> None:
            wait_for(lambda: case.server.context.active_requests == 2)
            raise RuntimeError("injected")

        monkeypatch.setattr(PagedRuntime, "collect", fail)
        monkeypatch.setattr(case.engine, "init_paged_runtime", fail)
        with ThreadPoolExecutor(2) as clients:
            ask = partial(case.http.post, "/v1/completions", json=LONG)
            answers = [each.result() for each in [clients.submit(ask) for _ in range(2)]]
        assert {answer.status_code for answer in answers} <= {500, 503}
        wait_for(lambda: case.server.context.readiness == "failed")


def test_an_adapter_is_a_model_to_ask_for(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", GOLDEN, ("q_proj", "v_proj"))
    config = dataclasses.replace(ENGINE, max_adapters=1, max_adapter_rank=4)
    with running_server(tmp_path / "tiny", config=config, adapters={"poems": adapter}) as case:
        assert [card["id"] for card in case.http.get("/v1/models").json()["data"]] == ["tiny", "poems"]
        asked = {"prompt": list(range(10, 60)), "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
        answers = {name: case.post("/v1/completions", model=name, **asked) for name in ("tiny", "poems")}
        case.settle()
        for name, adapter_name in (("tiny", None), ("poems", "poems")):
            params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=True)
            (expected,) = case.engine.generate([asked["prompt"]], params, adapters=adapter_name)
            scores = answers[name]["choices"][0]["logprobs"]["token_logprobs"]
            assert scores == pytest.approx(expected.logprobs, abs=1e-5)
            assert answers[name]["model"] == name
            assert answers[name]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        echoed = case.post("/v1/completions", model="poems", **{**asked, "echo": True, "max_tokens": 0})
        assert echoed["choices"][0]["logprobs"]["token_logprobs"][1:] != pytest.approx(
            case.post("/v1/completions", **{**asked, "echo": True, "max_tokens": 0})["choices"][0]["logprobs"][
                "token_logprobs"
            ][1:]
        )


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as reserved:
        yield reserved


HELD_WHILE_IT_LOADS = """
import sys, time
from kv_execution import PagedEngine
from kv_serving.cli import main

warm_up = PagedEngine.warmup_paged

def held(self, progress, **options):
    def hold(done, shape):
        progress(done, shape)
        if done == 2:
            print("held", file=sys.stderr, flush=True)
            time.sleep(3600)
    return warm_up(self, hold, **options)

PagedEngine.warmup_paged = held
main()
"""


@pytest.mark.slow
def test_a_server_that_is_killed_is_ready_again_and_compiles_nothing_that_it_had(tmp_path: Path, port: int) -> None:
    model, cache, log = write_tiny_model(tmp_path / "tiny"), tmp_path / "jaxkv" / "compilation", tmp_path / "log"
    options = ["serve", str(model), "--port", str(port)]
    options += ["--max-requests", "2", "--max-step-tokens", "8", "--max-context", "64"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_EXPLAIN_CACHE_MISSES": "true"}

    def start(code: str = "from kv_serving.cli import main; main()") -> "subprocess.Popen[bytes]":
        with log.open("wb") as stderr:
            return subprocess.Popen([sys.executable, "-c", code, *options], env=environment, stderr=stderr)

    def ready(at: str = "/ready") -> bool:
        with contextlib.suppress(OSError):
            return get(f"http://127.0.0.1:{port}{at}")[0] == 200
        return False

    def misses() -> int:
        return log.read_bytes().count(b"PERSISTENT COMPILATION CACHE MISS")

    def held() -> bool:
        return ready("/health") and b"held\n" in log.read_bytes()

    server = start(HELD_WHILE_IT_LOADS)
    wait_for(held)
    assert not ready()
    server.kill()
    server.wait()
    compiled = set(cache.iterdir())
    assert len(compiled) > 2
    server = start(HELD_WHILE_IT_LOADS)
    wait_for(held)
    server.terminate()
    assert server.wait(HANG_S) == 0
    server = start()
    wait_for(ready)
    assert compiled <= set(cache.iterdir())
    assert misses() > 0
    asked, statuses = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}, []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S, trust_env=False) as http:
        expected = http.post("/v1/completions", json=asked).json()["choices"]

        def ask_while_it_lives() -> None:
            with contextlib.suppress(httpx.TransportError):
                while True:
                    statuses.append(http.post("/v1/completions", json=asked).status_code)

        with ThreadPoolExecutor(6) as clients:
            for _ in range(6):
                clients.submit(ask_while_it_lives)
            wait_for(lambda: len(statuses) > 30)
            server.kill()
            server.wait()
        assert set(statuses) == {200}
        server = start()
        wait_for(ready)
        assert misses() == 0
        assert http.post("/v1/completions", json=asked).json()["choices"] == expected
    server.terminate()
    assert server.wait(HANG_S) == 0
