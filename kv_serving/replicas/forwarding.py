"""A request over HTTP as a value that travels from the front to a replica, and the app's answer on its way back."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope


class ForwardedRequest(NamedTuple):
    """All of a request that its answer can depend on."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes

    @property
    def scope(self) -> Scope:
        """As an ASGI app has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "headers": self.headers,
            "client": self.client,
        }


async def read_request(scope: Scope, receive: Receive) -> ForwardedRequest:
    """The request that an ASGI app is called with. Raises what `receive` raises."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    client = scope.get("client")
    return ForwardedRequest(
        scope["method"],
        scope["path"],
        scope["query_string"],
        headers,
        (client[0], client[1]) if client else None,
        bytes(body),
    )


async def answered(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
    """What `app` sends, as many messages at a time as there are; it is cancelled when nobody reads on."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        return await asyncio.Future()  # the client is the front's to watch

    async def run() -> None:
        try:
            await app(request.scope, receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while True:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            if sent := [message for message in batch if message is not None]:
                yield sent
            if batch[-1] is None:
                return
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
