"""The body of /v1/chat/completions, and its messages as a chat template takes them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kv_serving.server.errors import ApiError
from kv_serving.server.sampling_fields import RequestModel, SamplingFields


class TextPart(BaseModel):
    """A part of a message; text is the one kind that there is."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class FunctionCall(RequestModel):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(RequestModel):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message; what a template does not know of it is its own affair."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its text in one piece, and the arguments of calls as values. Raises ApiError."""
        message: dict[str, Any] = {"role": self.role, "content": self._text()}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        message |= self.model_extra or {}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise ApiError(400, f"a part of a message is {part.type!r}: give text alone", param="messages")
        return "".join(part.text or "" for part in self.content)


class ChatRequest(SamplingFields):
    """A conversation to answer."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    def check(self) -> None:
        """Raises ApiError for what is well-formed and not to be had."""
        self.check_stream_options()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ApiError(400, "the arguments of a tool call are not JSON: send them as the model gave them") from error
