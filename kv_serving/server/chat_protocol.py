"""The body of /v1/chat/completions, and its messages as a chat template takes them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kv_serving.server.errors import ApiError
from kv_serving.server.form_fields import NamedTool, ResponseFormat, Tool, ToolChoice
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

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
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
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def tools_in_use(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def tools_to_call(self) -> list[Tool]:
        """Those of which one has to be called; empty where none has to."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return self.tools_in_use if self.tool_choice == "required" else []

    def check(self) -> None:
        """Raises ApiError for what is well-formed and not to be had."""
        self.check_stream_options()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
        if self.tool_choice not in (None, "none", "auto") and not self.tools_to_call:
            raise ApiError(400, "tool_choice asks for a tool that is not in tools: add it there", param="tool_choice")
        form = self.response_format is not None and self.response_format.type != "text"
        if form and self.tools_to_call:
            raise ApiError(400, "an answer cannot be a call and of response_format: leave one out", param="tool_choice")
        if (form or self.tools_to_call) and (self.min_tokens or self.ignore_eos):
            raise ApiError(400, "an answer with a form ends where it is complete: leave out min_tokens and ignore_eos")


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ApiError(400, "the arguments of a tool call are not JSON: send them as the model gave them") from error
