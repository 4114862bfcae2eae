"""A server on a free port of this machine, over the tiny model, in a thread."""

import contextlib
import json
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
from default_provider import PROVIDER
from tiny_model import write_tiny_model

from kv_execution import EngineConfig, PagedEngine
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
        """Wait until nothing runs, and check that nothing is held."""
        wait_for(lambda: self.stats.running == self.stats.waiting == 0)
        assert self.stats.pages_in_use == 0
        wait_for(lambda: self.server.context.active_requests == 0)

    @property
    def stats(self) -> Any:
        snapshot = self.server.context.engine.snapshot
        assert snapshot is not None
        return snapshot.stats


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)


@contextlib.contextmanager
def running_server(
    directory: Path,
    load: Callable[[], Loaded] | None = None,
    config: EngineConfig = ENGINE,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[Case]:
    """Start, wait until it is ready, and drain at the end; with `load` it is not waited for."""
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
        args=(ServerSettings(name="tiny", port=0, **settings), load or load_engine, listening.put),
        daemon=True,
    )
    thread.start()
    server = listening.get(timeout=60)
    try:
        if load is None:
            wait_for(lambda: server.context.readiness == "ready", 60)
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            yield Case(server, model, engine, http)
    finally:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()


def get(url: str) -> tuple[int, bytes]:
    """Status and body, errors included."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
