"""The endpoints for those who run the server."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from kv_common import __version__
from kv_serving.server.context import Readiness, context_of
from kv_serving.server.delivery import json_response
from kv_serving.server.server_metrics import CONTENT_TYPE
from kv_serving.server.status_page import CONTENT_SECURITY, page, status_of

router = APIRouter()


@router.get("/", include_in_schema=False)
async def status_page() -> Response:
    """The status page."""
    headers = {"content-security-policy": CONTENT_SECURITY, "x-content-type-options": "nosniff"}
    return Response(page(), headers=headers, media_type="text/html; charset=utf-8")


@router.get("/status")
async def status(request: Request) -> Response:
    """The numbers of the status page."""
    return json_response(status_of(context_of(request)))


@router.get("/health", responses={503: {"description": "The engine has failed."}})
async def health(request: Request) -> Response:
    """Whether the process is of use, or should be started again."""
    readiness = context_of(request).readiness
    return json_response({"status": readiness}, 503 if readiness is Readiness.FAILED else 200)


@router.get("/ready", responses={503: {"description": "Requests are not taken now."}})
async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    readiness = context_of(request).readiness
    return json_response({"status": readiness}, 200 if readiness is Readiness.READY else 503)


@router.get("/version")
async def version() -> Response:
    """The version of jaxkv."""
    return json_response({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus's text format."""
    return Response(context_of(request).metrics.exposition(), media_type=CONTENT_TYPE)
