"""What clients connect to: it asks a replica for the chain of a prompt, and hands the request to the one the router
chooses by it.

Contract: what is refused without a model (keys, sizes) is refused here. A request whose replica dies before its answer
has begun is given to another; when the client goes away the replica is told at once.
"""

from typing import TYPE_CHECKING

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kv_serving.replicas.forwarding import ForwardedRequest, read_request
from kv_serving.server.delivery import ClientGoneError, json_response, while_there
from kv_serving.server.errors import ApiError, too_many, unavailable

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

ATTEMPTS = 3
PROMPTED = ("/v1/completions", "/v1/chat/completions")


class Front:
    """An ASGI app over the replicas."""

    def __init__(self, replicas: "DeploymentHandle") -> None:
        self._chain = replicas.chain
        self._answer = replicas.answer.options(stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        try:
            request = await read_request(scope, receive)
            await while_there(receive, self._forward(request, send))
        except ClientGoneError:
            return
        except ApiError as error:
            headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
            await json_response(error.body(), error.status, headers)(scope, receive, send)
        except HTTPException as error:
            await json_response(ApiError(error.status_code, error.detail).body(), error.status_code)(
                scope, receive, send
            )

    async def _forward(self, request: ForwardedRequest, send: Send) -> None:
        """Raises ApiError where nothing was sent yet."""
        try:
            for _ in range(ATTEMPTS):
                if await self._attempt(request, send):
                    return
        except BackPressureError as error:
            raise too_many("too many requests wait for a replica; try again soon") from error
        raise unavailable("the replicas that had the request have died; send it again", 1)

    async def _attempt(self, request: ForwardedRequest, send: Send) -> bool:
        """Whether a replica has answered; False where it died before it began."""
        begun = False
        try:
            chain = await self._chain.remote(request) if request.path in PROMPTED else b""
            messages = self._answer.remote(request, chain=chain)
            try:
                async for some in messages:
                    for message in some:
                        begun = True
                        await send(message)
            finally:
                messages.cancel()
        except RayActorError:
            if begun:
                raise
            return False
        return True
