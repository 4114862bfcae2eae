"""Around everything: the id of a request, its line in the log, its span, and the answer to what nobody foresaw.

Contract: each response has an `X-Request-Id`, the client's own where that is a short plain word. The log has one line
for each request, without any text of prompts or answers.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kv_serving.server.context import GOING_DOWN
from kv_serving.server.delivery import ClientGoneError, json_response
from kv_serving.server.errors import api_error_of, unavailable
from kv_serving.server.server_metrics import ServerMetrics
from kv_serving.server.traces import Traces

logger = logging.getLogger("kv_serving.access")

_PROBES = {"/health", "/ready", "/metrics", "/status"}
"""Asked every few seconds by machines: their lines are for whoever debugs."""

_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
CLIENT_GONE = 499
"""Status in the log of a request whose client did not wait."""


class Envelope:
    """An ASGI middleware."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, leaves: Callable[[], bool], traces: Traces | None = None
    ) -> None:
        """`leaves` says whether the server is on its way to its end."""
        self._app = app
        self._traces = traces
        self._leaves = leaves
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, started_s, status = _request_id(scope), time.monotonic(), 0

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except ClientGoneError:
            status = CLIENT_GONE
        except asyncio.CancelledError:  # the server leaves, and waits for nobody any more
            if not self._leaves():
                raise
            if not status:
                await json_response(unavailable(GOING_DOWN, 1).body(), 503, {"retry-after": "1"})(
                    scope, receive, with_id
                )
        except Exception as error:  # the last one who can answer
            logger.exception("a request failed", extra={"fields": {"request_id": request_id.decode()}})
            if not status:
                await json_response(api_error_of(error).body(), 500)(scope, receive, with_id)
        finally:
            self._note(scope, request_id.decode(), status, time.monotonic() - started_s)

    def _note(self, scope: Scope, request_id: str, status: int, duration_s: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
        self._metrics.response(method, route, status)
        client, answer = scope.get("client"), scope.get("jaxkv.answer")
        fields = {
            "request_id": request_id,
            "method": method,
            "path": route,
            "status": status,
            "duration_s": round(duration_s, 4),
            "client": client[0] if client else None,
            **(answer.facts() if answer is not None else {}),
        }
        logger.log(logging.DEBUG if route in _PROBES else logging.INFO, "request", extra={"fields": fields})
        if self._traces is not None:
            self._traces.note(dict(scope["headers"]), fields)


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()
