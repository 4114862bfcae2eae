"""The endpoint that turns texts into vectors."""

from fastapi import APIRouter, Request, Response

from kv_serving.server.context import context_of, tenant_of
from kv_serving.server.delivery import json_response, while_there
from kv_serving.server.embedding_protocol import EmbeddingRequest
from kv_serving.server.routes import ERRORS

router = APIRouter(responses=ERRORS)


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """A vector of length 1 for each input."""
    service = context_of(request).service
    vectors, prompt_tokens = await while_there(request.receive, service.embeddings.embed(body, tenant_of(request)))
    return json_response(body.response(body.model or service.name, vectors, prompt_tokens))
