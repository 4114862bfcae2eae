"""One server from its first second to its last: listen, load, answer, drain, leave.

Contract: the port listens at once, and requests are refused with 503 until the model is there. The first SIGTERM or
SIGINT drains: what is being answered goes on, for `drain_s` seconds at most, new requests are refused; a second signal
leaves at once. Where the model cannot be loaded the server ends, and `serve` raises why.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from kv_common.errors import JaxkvError
from kv_serving.server.api_keys import ApiKeys
from kv_serving.server.app import create_app
from kv_serving.server.context import ServerContext
from kv_serving.server.engine_loop import EngineLoop, EngineState
from kv_serving.server.limits import Limits
from kv_serving.server.server_metrics import ServerMetrics
from kv_serving.server.service import Service
from kv_serving.server.traces import Traces

if TYPE_CHECKING:
    from kv_execution import PagedEngine
    from models import LoadedModel

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 << 10
SWITCH_INTERVAL_S = 0.001
"""How soon the engine's thread gets the interpreter back from the front; Python's own 5 ms is a decode step's worth."""

LEAVE_S = 1
"""How long connections, and then a step of the engine, have to end once requests have been told that they do."""


KEEP_ALIVE_S = 75
"""How long a connection may idle. Clients and proxies keep theirs for 5 to 60 s and have to be first to close it: a
request that is sent while the server closes gets no answer."""


class EngineFailedError(JaxkvError):
    """The engine's thread ended while the server ran."""


class Loaded(NamedTuple):
    """A model and an engine that is ready to run it; the adapters that it has loaded can be asked for by name."""

    model: "LoadedModel"
    engine: "PagedEngine"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where to listen and whom to serve."""

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 30.0
    pooling: str = "mean"
    otlp_traces_endpoint: str | None = None
    """Where spans go; None for none."""

    @property
    def open_to_all(self) -> bool:
        """Whether other machines may ask without a key."""
        return not self.api_keys and self.host not in ("127.0.0.1", "::1", "localhost")


class _Server(uvicorn.Server):
    """uvicorn's, but that a signal drains first."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First drain, then leave."""
        self._signals += 1
        if self._signals == 1:
            self._drain()
        else:
            self.should_exit = self.force_exit = True


class RunningServer(NamedTuple):
    """A server that listens at `url`; `drain`, which any thread may call, ends it as a signal does."""

    url: str
    context: ServerContext
    drain: Callable[[], None]


def serve(
    settings: ServerSettings,
    load: Callable[[], Loaded],
    on_listening: Callable[[RunningServer], None] = lambda server: None,
) -> bool:
    """Serve until a signal; whether the engine's thread has ended, which it has not where a load was cut off.

    Raises OSError where the port is taken, and what `load` raises.
    """
    listener = listen(settings.host, settings.port)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with listener:
        return asyncio.run(_serve(settings, load, listener, on_listening))


async def _serve(
    settings: ServerSettings,
    load: Callable[[], Loaded],
    listener: socket.socket,
    on_listening: Callable[[RunningServer], None],
) -> bool:
    loop = asyncio.get_running_loop()

    def on_state(state: EngineState) -> None:
        if state is EngineState.FAILED:
            server.should_exit = True

    context, start_engine = open_context(settings, load, on_state)
    engine = context.engine
    asked_to_drain = asyncio.Event()

    def drain() -> None:
        context.draining = True
        with contextlib.suppress(RuntimeError):  # of a loop that is closed: the server has ended already
            loop.call_soon_threadsafe(asked_to_drain.set)

    config = uvicorn.Config(
        create_app(context, settings.api_keys),
        http="h11",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LEAVE_S,
    )
    server = _Server(config, drain)
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    logger.info("listening", extra={"fields": {"url": url}})
    if settings.open_to_all:
        logger.warning("anyone who reaches this address may ask: give an API key, or listen on 127.0.0.1 alone")
    on_listening(RunningServer(url, context, drain))
    start_engine()
    # Waits from the start: a task that is made when the signal comes may be made of a loop that is about to close.
    draining = asyncio.create_task(_drain(asked_to_drain, context, server, settings.drain_s))
    try:
        await server.serve(sockets=[listener])
    finally:
        draining.cancel()
        ended = await asyncio.to_thread(engine.stop, LEAVE_S)
        if context.traces is not None:
            await asyncio.to_thread(context.traces.close, LEAVE_S)
    if engine.state is EngineState.FAILED:
        if isinstance(engine.error, JaxkvError):
            raise engine.error
        raise EngineFailedError(f"the engine has failed ({engine.error!r}); see the log") from engine.error
    return ended


def open_context(
    settings: ServerSettings,
    load: Callable[[], Loaded],
    on_state: Callable[[EngineState], None],
    after_step: Callable[["PagedEngine"], None] = lambda engine: None,
) -> tuple[ServerContext, Callable[[], None]]:
    """A server on the running event loop, still without its model, and what begins to load that.

    `on_state` is called on the loop, `after_step` on the engine's thread, before the first step too.
    """
    made: list[Service] = []

    def on_engine_state(state: EngineState) -> None:
        if state is EngineState.READY:
            context.serve(made[0])
            logger.info("ready", extra={"fields": {"model": settings.name}})
        on_state(state)

    def load_engine() -> "PagedEngine":
        loaded = load()
        service = Service(
            name=settings.name,
            model=loaded.model,
            plan=loaded.engine.describe(),
            engine=engine,
            limits=settings.limits,
            metrics=context.metrics,
            adapters=loaded.engine.adapters.names,
            pooling=settings.pooling,
        )
        made.append(service)
        return loaded.engine

    engine = EngineLoop(asyncio.get_running_loop(), on_engine_state, after_step)
    metrics = ServerMetrics(lambda: engine.snapshot)
    traces = None if settings.otlp_traces_endpoint is None else Traces(settings.otlp_traces_endpoint)
    context = ServerContext(settings.name, engine, settings.limits, metrics, time.time(), traces)
    return context, lambda: engine.start(load_engine)


async def _drain(asked: asyncio.Event, context: ServerContext, server: uvicorn.Server, drain_s: float) -> None:
    await asked.wait()
    logger.info("draining", extra={"fields": {"active": context.active_requests}})
    end_s = time.monotonic() + drain_s
    while server.server_state.tasks and time.monotonic() < end_s:  # also those that are still being read
        await asyncio.sleep(0.02)
    context.end_requests()
    server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; what is accepted on it sends at once.

    asyncio sees to that only for sockets that were made with their protocol's number, which this is not; without it
    the body of an answer would wait 40 ms for the client to acknowledge the headers.

    Raises OSError where the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
