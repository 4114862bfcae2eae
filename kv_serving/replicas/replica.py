"""One engine and the whole HTTP application over it, as a Ray Serve replica.

Contract: it is there once its model is loaded and compiled; it is unhealthy, and so replaced, once its engine has
failed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from ray import serve
from starlette.types import Message

from kv_common.errors import JaxkvError
from kv_serving.replicas.affinity import CachedKeys, packed
from kv_serving.replicas.forwarding import ForwardedRequest, answered
from kv_serving.replicas.router import SUMMARY
from kv_serving.server.app import create_app
from kv_serving.server.context import Readiness
from kv_serving.server.engine_loop import EngineState
from kv_serving.server.logs import log_to_stderr
from kv_serving.server.run import Loaded, ServerSettings, open_context


class ReplicaFailedError(JaxkvError):
    """The engine of a replica has failed."""


class Replica:
    """What Ray Serve runs, once for each replica."""

    async def __init__(self, settings: ServerSettings, load: Callable[[], Loaded], log_level: str) -> None:  # type: ignore[misc]
        log_to_stderr(log_level)
        settled = asyncio.Event()

        def on_state(state: EngineState) -> None:
            settled.set()

        self._loaded: list[Loaded] = []

        def load_once() -> Loaded:
            self._loaded.append(load())
            return self._loaded[0]

        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._cached = CachedKeys()
        self._keys = settings.api_keys
        self._context, start = open_context(settings, load_once, on_state, self._cached.follow)
        self._app = create_app(self._context, settings.api_keys)
        start()
        await settled.wait()
        self.check_health()

    def check_health(self) -> None:
        """Raises ReplicaFailedError once the engine has failed."""
        if self._context.readiness is Readiness.FAILED:
            raise ReplicaFailedError(f"the engine has failed ({self._context.engine.error!r}); see the replica's log")

    def record_routing_stats(self) -> dict[str, bytes]:
        """What the router is told."""
        return {SUMMARY: self._cached.summary()}

    async def chain(self, request: ForwardedRequest) -> bytes:
        """The chain of the request's first prompt; empty where it has none, which its answer will say."""
        tenant = self._keys.tenant_of(dict(request.headers).get(b"authorization"))
        if tenant is None:
            return b""
        try:
            token_ids, salt, adapter = await self._context.service.first_prompt(request.path, request.body, tenant)
            return packed(self._loaded[0].engine.prefix_keys(token_ids, cache_salt=salt, adapter=adapter))
        except (JaxkvError, ValueError):
            return b""

    async def answer(self, request: ForwardedRequest, *, chain: bytes) -> AsyncIterator[list[Message]]:
        """The application's messages. `chain` is for the router."""
        async for messages in answered(self._app, request):
            for message in messages:
                if message["type"] == "http.response.start":
                    # The id is the same, and Ray Serve's proxy sets it.
                    headers = [each for each in message["headers"] if each[0] != b"x-request-id"]
                    message["headers"] = [*headers, (b"x-replica", self._name)]
            yield messages

    def __del__(self) -> None:
        self._context.engine.stop()
