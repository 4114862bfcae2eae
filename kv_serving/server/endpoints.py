"""What the endpoints that generate do, whoever brings the request: over HTTP, or from a file."""

from typing import NamedTuple

from kv_serving.server.answer import Answer
from kv_serving.server.chat_protocol import ChatRequest
from kv_serving.server.chat_responses import ChatShape
from kv_serving.server.completion_protocol import CompletionRequest
from kv_serving.server.responses import CompletionShape, Shape
from kv_serving.server.service import Service


class Begun(NamedTuple):
    """An answer that nobody has read yet, and how it is written."""

    answer: Answer
    shape: Shape


async def begin_completion(service: Service, body: CompletionRequest, tenant: str) -> Begun:
    """/v1/completions. Raises JaxkvError."""
    answer = await service.complete(body, tenant)
    return Begun(answer, CompletionShape(body.model or service.name, service.texts, logprobs=body.logprobs is not None))


async def begin_chat(service: Service, body: ChatRequest, tenant: str) -> Begun:
    """/v1/chat/completions. Raises JaxkvError."""
    answer = await service.chat(body, tenant)
    tool_format = service.tool_format if body.tools_in_use else None
    shape = ChatShape(body.model or service.name, service.texts, logprobs=bool(body.logprobs), tool_format=tool_format)
    return Begun(answer, shape)
