"""A server on a free port of this machine, over the tiny model, in a thread."""

import contextlib
import json
import queue
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
from default_provider import PROVIDER
from patience import HANG_S, wait_for
from tiny_model import write_tiny_model

from kv_execution import EngineConfig, PagedEngine
from kv_serving.server import grammars
from kv_serving.server.run import Loaded, RunningServer, ServerSettings, serve
from models import LoadedModel, load_model

ENGINE = EngineConfig(
    kv_pool_bytes=1 << 20,
    max_requests=4,
    max_step_tokens=64,
    max_context=128,
    max_waiting=16,
    provider=PROVIDER,
    compilation_cache=False,
    burst_s=0.0,  # a step is one step, whatever the clock says
)


class Case(NamedTuple):
    """A running server, the model it serves, and an HTTP client for it."""

    server: RunningServer
    model: LoadedModel
    engine: PagedEngine
    http: httpx.Client

    def post(self, path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        """The JSON that comes back, with the status that is expected."""
        response = self.http.post(path, json=body, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which ends as it has to."""
        response = self.http.post(path, json={"stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def settle(self) -> None:
        """Wait until nothing is left to do, and check that nothing is held."""
        wait_for(lambda: self.server.context.active_requests == 0)
        wait_for(self._engine_sleeps)  # what they left is aborted by then
        assert self.stats.running == self.stats.waiting == self.stats.pages_in_use == 0

    def _engine_sleeps(self) -> bool:
        """Whether the engine's thread waits for work: a request is given back to it before it counts as answered."""
        wake = self.server.context.engine._wake
        with wake:
            return bool(wake._waiters)  # type: ignore[attr-defined]

    @property
    def stats(self) -> Any:
        snapshot = self.server.context.engine.snapshot
        assert snapshot is not None
        return snapshot.stats


@contextlib.contextmanager
def running_server(
    directory: Path,
    load: Callable[[], Loaded] | None = None,
    config: EngineConfig = ENGINE,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[Case]:
    """Start, wait until it is ready, and drain at the end, which leaves no thread of it; with `load` it is not waited
    for.
    """
    model = load_model(write_tiny_model(directory))
    engine = PagedEngine(model, config)

    def load_engine() -> Loaded:
        engine.init_paged_runtime()
        for name, path in adapters.items():
            engine.adapters.load(name, path)
        return Loaded(model, engine)

    listening: queue.Queue[RunningServer] = queue.Queue()
    thread = threading.Thread(
        target=serve,
        args=(
            ServerSettings(**{"name": "tiny", "port": 0, "drain_s": HANG_S, **settings}),
            load or load_engine,
            listening.put,
        ),
        daemon=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "COMPILE_S", HANG_S)  # a form takes milliseconds, on a machine that does not pause
        thread.start()
        server = listening.get(timeout=HANG_S)
        try:
            if load is None:
                wait_for(lambda: server.context.readiness == "ready")
            with httpx.Client(base_url=server.url, timeout=HANG_S, trust_env=False) as http:
                yield Case(server, model, engine, http)
        finally:
            server.drain()
            thread.join(HANG_S)
            assert not thread.is_alive()
            wait_for(lambda: server.context.engine.stop(HANG_S))


def get(url: str) -> tuple[int, bytes]:
    """Status and body, errors included."""
    try:
        with urllib.request.urlopen(url, timeout=HANG_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
