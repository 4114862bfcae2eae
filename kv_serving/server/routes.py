"""The endpoints that generate, and those that tokenize."""

from typing import Any

from fastapi import APIRouter, Request, Response

from kv_serving.server.chat_protocol import ChatRequest
from kv_serving.server.completion_protocol import CompletionRequest
from kv_serving.server.context import context_of, tenant_of
from kv_serving.server.delivery import json_response, respond
from kv_serving.server.endpoints import begin_chat, begin_completion
from kv_serving.server.token_protocol import DetokenizeRequest, TokenizeRequest

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request cannot be answered as it is.",
        401: "No API key, or a wrong one.",
        404: "No such model.",
        408: "The deadline passed before the first token.",
        413: "The body is too large.",
        415: "The body is not sent as application/json.",
        422: "A field is missing, unknown, or of the wrong type.",
        429: "Too many requests; see Retry-After.",
        500: "The server failed on this request.",
        503: "The model is being loaded, or the server is going down; see Retry-After.",
    }.items()
}

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or with `stream` its events.", "content": {"text/event-stream": {}}},
}

router = APIRouter(responses=ERRORS)


@router.post("/v1/completions", responses=STREAMED)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Go on from a text, or from token ids."""
    begun = await begin_completion(context_of(request).service, body, tenant_of(request))
    return await respond(request, body, begun)


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    begun = await begin_chat(context_of(request).service, body, tenant_of(request))
    return await respond(request, body, begun)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served, and its adapters."""
    names = context_of(request).service.names
    return json_response({"object": "list", "data": [_card(request, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One model."""
    context_of(request).service.check_model(name)
    return json_response(_card(request, name))


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation."""
    service = context_of(request).service
    service.check_model(body.model)
    if body.messages is not None:
        tokens = await service.encode_messages(body.messages)
    else:
        tokens = await service.encode(body.prompt or "", add_special=body.add_special_tokens)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_context})


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Text of token ids."""
    service = context_of(request).service
    service.check_model(body.model)
    return json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special=False)})


def _card(request: Request, name: str) -> dict[str, object]:
    context = context_of(request)
    service = context.service
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_s),
        "owned_by": "jaxkv",
        "parent": None if name == service.name else service.name,
        "max_model_len": service.max_context,
    }
