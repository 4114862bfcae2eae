"""What the routes of one server share, and where the server is in its life."""

from enum import StrEnum
from typing import TYPE_CHECKING

from starlette.requests import Request

from kv_serving.server.engine_loop import EngineLoop, EngineState
from kv_serving.server.errors import unavailable
from kv_serving.server.limits import Limits
from kv_serving.server.server_metrics import ServerMetrics
from kv_serving.server.traces import Traces

if TYPE_CHECKING:
    from kv_serving.server.service import Service


GOING_DOWN = "the server is going down; send the request to another"


class Readiness(StrEnum):
    """Whether requests are taken, and why not."""

    READY = "ready"
    LOADING = "loading"
    DRAINING = "draining"
    FAILED = "failed"


class ServerContext:
    """One server: its engine, and once that is loaded the service over it."""

    def __init__(
        self,
        name: str,
        engine: EngineLoop,
        limits: Limits,
        metrics: ServerMetrics,
        started_s: float,
        traces: Traces | None = None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.limits = limits
        self.metrics = metrics
        self.started_s = started_s
        self.traces = traces
        self.draining = False
        self._service: Service | None = None

    @property
    def readiness(self) -> Readiness:
        """Whether requests are taken."""
        if self.engine.state is EngineState.FAILED:
            return Readiness.FAILED
        if self.draining or self.engine.state is EngineState.STOPPED:
            return Readiness.DRAINING
        return Readiness.LOADING if self._service is None else Readiness.READY

    @property
    def active_requests(self) -> int:
        """Requests that are being answered."""
        return 0 if self._service is None else self._service.concurrency.active

    def end_requests(self) -> None:
        """Time is up: what is still being answered fails."""
        if self._service is not None:
            self._service.concurrency.end(unavailable(GOING_DOWN, 1))

    def serve(self, service: "Service") -> None:
        """The engine is ready."""
        self._service = service

    @property
    def service(self) -> "Service":
        """The service. Raises ApiError while no requests are taken."""
        readiness = self.readiness
        if readiness is Readiness.READY and self._service is not None:
            return self._service
        if readiness is Readiness.LOADING:
            raise unavailable("the model is being loaded; try again soon", 5)
        if readiness is Readiness.DRAINING:
            raise unavailable(GOING_DOWN, 1)
        raise unavailable("the engine has failed; the server has to be started again", 30)


def context_of(request: Request) -> ServerContext:
    """The server that `request` came to."""
    context: ServerContext = request.app.state.context
    return context


def tenant_of(request: Request) -> str:
    """What keeps the cache of one API key's holder apart from another's; empty where there are no keys."""
    tenant: str = request.scope.get("jaxkv.tenant", "")
    return tenant


def salt_of(tenant: str, asked: str | None) -> str:
    """What keeps cached pages apart: one tenant's from another's, and those of the salts that a tenant asks for."""
    return f"{tenant}:{asked or ''}"
