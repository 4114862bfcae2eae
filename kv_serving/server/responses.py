"""The JSON of answers, whole and in chunks, field by field as OpenAI's API has it.

A `Shape` knows one of the two kinds; streams and whole answers are made by the same one, so that they say the same.
"""

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kv_serving.server.answer import Piece, Usage
from kv_serving.server.token_text import TextOffsets, TokenTexts

Body = dict[str, Any]


def encode_json(body: Mapping[str, Any]) -> bytes:
    """`body` in UTF-8; a lone surrogate, which no encoding can carry, becomes `?`."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class Shape(Protocol):
    """How one kind of answer is written."""

    def opening(self, choice: int) -> Body | None:
        """The first chunk of a choice, where it has one of its own."""

    def chunk(self, piece: Piece) -> Body | None:
        """A chunk of a stream; None where there is nothing to say yet."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Body:
        """The whole answer; `choices` are in order and complete."""

    def closing(self, usage: Usage) -> Body:
        """The chunk that has nothing but the usage."""


class CompletionShape:
    """/v1/completions."""

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool) -> None:
        self._head = head("cmpl", model)
        self._texts = texts
        self._logprobs = logprobs
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(lambda: TextOffsets(texts))

    def opening(self, choice: int) -> Body | None:
        """None: a choice begins with its text."""
        return None

    def chunk(self, piece: Piece) -> Body:
        """A chunk of a stream."""
        return {**self._head, "object": "text_completion", "choices": [self._choice(piece)]}

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Body:
        """The whole answer."""
        written = [self._choice(choice) for choice in choices]
        return {**self._head, "object": "text_completion", "choices": written, "usage": usage.body()}

    def closing(self, usage: Usage) -> Body:
        """The chunk that has nothing but the usage."""
        return {**self._head, "object": "text_completion", "choices": [], "usage": usage.body()}

    def _choice(self, piece: Piece) -> Body:
        logprobs = None
        if self._logprobs:
            offsets = self._offsets[piece.choice].take(piece.tokens, piece.text)
            logprobs = self._texts.completion_logprobs(piece.tokens, offsets)
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


def head(prefix: str, model: str) -> Body:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
