"""The bodies of /tokenize and /detokenize."""

from typing import Self

from pydantic import model_validator

from kv_serving.server.chat_protocol import ChatMessage
from kv_serving.server.sampling_fields import RequestModel


class TokenizeRequest(RequestModel):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: list[int]
