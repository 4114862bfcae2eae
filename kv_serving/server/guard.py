"""Stands before the routes: API keys and the size of bodies.

Contract: without a key that is known nothing behind a guarded path is reached, and no byte of the body is read. A body
that is too large is refused by its length, or when it has grown too long.
"""

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kv_serving.server.api_keys import ApiKeys
from kv_serving.server.delivery import json_response
from kv_serving.server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/status", "/health", "/ready", "/version", "/metrics"})
"""Paths that need no key: they tell nothing of any request."""


class Guard:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        tenant = self._keys.tenant_of(headers.get(b"authorization"))
        if tenant is None and scope["path"] not in OPEN_PATHS:
            error = ApiError(401, "there is no such API key: send `Authorization: Bearer KEY`", code="invalid_api_key")
            await json_response(error.body(), 401, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        scope["jaxkv.tenant"] = tenant or ""
        if self._declared(headers) > self._max_body_bytes:
            await json_response(self._too_large().body(), 413)(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _declared(self, headers: Mapping[bytes, bytes]) -> int:
        length = headers.get(b"content-length", b"0")
        return int(length) if length.isdigit() else 0

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                # Of this kind, for whoever parses the body would take any other for its own.
                raise HTTPException(413, str(self._too_large()))
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes: send less", code="body_too_large")
