"""The ASGI application: routes, what stands before them, and how failures are told."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from kv_common import __version__
from kv_common.errors import JaxkvError
from kv_serving.server import embedding_routes, operation_routes, routes
from kv_serving.server.api_keys import ApiKeys
from kv_serving.server.context import ServerContext
from kv_serving.server.delivery import ClientGoneError, json_response
from kv_serving.server.envelope import CLIENT_GONE, Envelope
from kv_serving.server.errors import INVALID_JSON, ApiError, api_error_of, malformed, not_sent_as_json
from kv_serving.server.guard import Guard


def create_app(context: ServerContext, keys: ApiKeys) -> ASGIApp:
    """The application over `context`, which may still be loading."""
    app = FastAPI(title="jaxkv", version=__version__, docs_url=None, redoc_url=None)
    app.state.context = context
    app.include_router(routes.router)
    app.include_router(embedding_routes.router)
    app.include_router(operation_routes.router)
    app.add_exception_handler(Exception, _refused)
    app.add_exception_handler(JaxkvError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    return Envelope(
        Guard(app, keys, context.limits.max_body_bytes), context.metrics, lambda: context.draining, context.traces
    )


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=CLIENT_GONE)
    return _response(api_error_of(error))


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    sent_as = request.headers.get("content-type", "")
    if error.errors()[0]["loc"] == ("body",) and "json" not in sent_as.lower():
        # Not read as JSON all the same: a page of another site could then send requests from a browser.
        return _response(not_sent_as_json(sent_as))
    return _response(malformed(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, (ValueError, RecursionError)):  # of whoever parsed the body
        return _response(INVALID_JSON)
    detail = error.detail
    if error.status_code == 404:
        detail = f"there is no {request.url.path[:200]}: see /openapi.json for what there is"
    elif error.status_code == 405:
        detail = f"{request.url.path[:200]} takes no {request.method}: see /openapi.json for what it takes"
    return _response(ApiError(error.status_code, detail))


def _response(error: ApiError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return json_response(error.body(), error.status, headers)
