"""The endpoints that turn texts into vectors or labels."""

from collections.abc import Awaitable

from fastapi import APIRouter, Request, Response

from kv_serving.server.classification import ClassifyRequest
from kv_serving.server.context import context_of, tenant_of
from kv_serving.server.delivery import json_response, while_there
from kv_serving.server.embedding_protocol import EmbeddingRequest
from kv_serving.server.embeddings import Pooled
from kv_serving.server.routes import ERRORS

router = APIRouter(responses=ERRORS)


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """A vector of length 1 for each input."""
    pooled = await _there(request, context_of(request).service.embeddings.embed(body, tenant_of(request)))
    return json_response(body.response(pooled.model, pooled.vectors, pooled.prompt_tokens))


@router.post("/classify")
async def classify(request: Request, body: ClassifyRequest) -> Response:
    """The label of each input, and the probabilities of all labels; of a model that classifies."""
    service = context_of(request).service
    pooled = await _there(request, service.embeddings.classify(body, tenant_of(request)))
    return json_response(body.response(pooled.model, service.model.labels, pooled.vectors, pooled.prompt_tokens))


async def _there(request: Request, work: Awaitable[Pooled]) -> Pooled:
    pooled = await while_there(request.receive, work)
    request.scope["jaxkv.answer"] = pooled  # for the log and the traces
    return pooled
