"""Answers on their way out: whole, or as server-sent events, for as long as the client is there.

Contract: a failure before the first piece is a response with its own status; one after it is an event with the error,
for the status is out by then. When the client goes away the answer is closed at once, and with it what ran for it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kv_common.errors import JaxkvError
from kv_serving.server.answer import Answer, Piece
from kv_serving.server.endpoints import Begun
from kv_serving.server.errors import api_error_of
from kv_serving.server.responses import Shape, encode_json
from kv_serving.server.sampling_fields import SamplingFields, StreamOptions

Result = TypeVar("Result")
_DONE = b"data: [DONE]\n\n"


class ClientGoneError(JaxkvError):
    """The client closed its connection before it had its answer."""


def json_response(body: dict[str, object], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(encode_json(body), status, headers, "application/json")


async def respond(request: Request, body: SamplingFields, begun: Begun) -> Response:
    """The response that carries an answer. Raises ApiError, and ClientGoneError where nobody is there to read it."""
    answer, shape = begun
    request.scope["jaxkv.answer"] = answer  # for the log and the traces
    pieces = answer.pieces()
    if not body.streams:
        choices = await while_there(request.receive, collect(pieces, answer.num_choices))
        return json_response(shape.whole(choices, answer.usage))
    # Until the first piece is there it may still turn out that there will be none.
    try:
        first = await while_there(request.receive, anext(pieces))
    except BaseException:
        await pieces.aclose()  # type: ignore[attr-defined]
        raise
    return EventStream(_chunks(first, pieces, answer, shape, body.stream_options or StreamOptions()))


class EventStream(Response):
    """Server-sent events, each as soon as it is there."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client goes away."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_there(receive, self._pump(send))
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _pump(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_there(receive: Receive, work: Awaitable[Result]) -> Result:
    """What `work` yields; cancelled, with a ClientGoneError, when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client closed its connection")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(pieces: AsyncIterator[Piece], choices: int) -> list[Piece]:
    """Each choice in one piece, in order. Raises ApiError."""
    texts: list[list[Piece]] = [[] for _ in range(choices)]
    async with aclosing(pieces):  # type: ignore[type-var]
        async for piece in pieces:
            texts[piece.choice].append(piece)
    return [
        parts[-1]._replace(
            text="".join(part.text for part in parts), tokens=[token for part in parts for token in part.tokens]
        )
        for parts in texts
    ]


async def _chunks(
    first: Piece, rest: AsyncIterator[Piece], answer: Answer, shape: Shape, options: StreamOptions
) -> AsyncIterator[bytes]:
    opened: set[int] = set()

    def event(body: dict[str, object]) -> bytes:
        if options.continuous_usage_stats:
            body["usage"] = answer.usage.body()
        elif options.include_usage:
            body.setdefault("usage", None)
        return b"data: " + encode_json(body) + b"\n\n"

    def events_of(piece: Piece) -> bytes:
        opening = None if piece.choice in opened else shape.opening(piece.choice)
        opened.add(piece.choice)
        return b"".join(event(body) for body in (opening, shape.chunk(piece)) if body is not None)

    async with aclosing(rest):  # type: ignore[type-var]
        try:
            yield events_of(first)
            async for piece in rest:
                if events := events_of(piece):
                    yield events
            if options.include_usage:
                yield event(shape.closing(answer.usage))
        except Exception as error:  # the status is out already, so the failure has to be an event
            yield b"data: " + encode_json(api_error_of(error).body()) + b"\n\n"
        yield _DONE
