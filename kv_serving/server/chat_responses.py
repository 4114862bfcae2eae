"""The JSON of answers to conversations, in which calls of tools stand apart from the text."""

import uuid
from collections.abc import Sequence

from kv_serving.server.answer import Piece, Usage
from kv_serving.server.request_group import ScoredToken
from kv_serving.server.responses import Body, head
from kv_serving.server.token_text import TokenTexts
from kv_serving.server.tool_call_reader import Read, ToolCallReader
from kv_serving.server.tool_formats import Call, ToolFormat


class _Written:
    """A choice as far as it is out."""

    def __init__(self, tool_format: ToolFormat | None) -> None:
        self._reader = None if tool_format is None else ToolCallReader(tool_format)
        self.calls = 0
        self.tokens: list[ScoredToken] = []

    def read(self, piece: Piece) -> Read:
        """What is certain of the text and the calls of the choice now."""
        if self._reader is None:
            return Read(piece.text, [])
        read = self._reader.push(piece.text)
        if piece.finish_reason is not None:
            rest = self._reader.finish()
            read = Read(read.text + rest.text, read.calls + rest.calls)
        return read

    def reason(self, piece: Piece) -> str | None:
        """The finish reason, where there are calls in the choice."""
        called = self._reader is not None and self._reader.found
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason


class ChatShape:
    """/v1/chat/completions; with a `tool_format` answers are read for calls."""

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool, tool_format: ToolFormat | None = None) -> None:
        self._head = head("chatcmpl", model)
        self._texts = texts
        self._logprobs = logprobs
        self._tool_format = tool_format
        self._written: dict[int, _Written] = {}

    def opening(self, choice: int) -> Body | None:
        """The chunk that says whose turn it is."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, (), None, None)

    def chunk(self, piece: Piece) -> Body | None:
        """A chunk of a stream."""
        written = self._written.setdefault(piece.choice, _Written(self._tool_format))
        written.tokens.extend(piece.tokens)
        read = written.read(piece)
        if not read.text and not read.calls and piece.finish_reason is None:
            return None
        delta: Body = {"content": read.text} if read.text else {}
        if read.calls:
            delta["tool_calls"] = [
                {"index": index, **_call(call)} for index, call in enumerate(read.calls, written.calls)
            ]
            written.calls += len(read.calls)
        tokens, written.tokens = written.tokens, []
        return self._chunk(piece.choice, delta, tokens, written.reason(piece), piece.stop_reason)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Body:
        """The whole answer."""
        written = [self._choice(piece) for piece in choices]
        return {**self._head, "object": "chat.completion", "choices": written, "usage": usage.body()}

    def closing(self, usage: Usage) -> Body:
        """The chunk that has nothing but the usage."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.body()}

    def _choice(self, piece: Piece) -> Body:
        written = _Written(self._tool_format)
        read = written.read(piece)
        message: Body = {"role": "assistant", "content": read.text, "refusal": None}
        if read.calls:
            message |= {"content": read.text or None, "tool_calls": [_call(call) for call in read.calls]}
        return {
            "index": piece.choice,
            "message": message,
            "logprobs": self._scores(piece.tokens),
            "finish_reason": written.reason(piece),
            "stop_reason": piece.stop_reason,
        }

    def _chunk(
        self,
        choice: int,
        delta: Body,
        tokens: Sequence[ScoredToken],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> Body:
        written: Body = {
            "index": choice,
            "delta": delta,
            "logprobs": self._scores(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            written["stop_reason"] = stop_reason
        return {**self._head, "object": "chat.completion.chunk", "choices": [written]}

    def _scores(self, tokens: Sequence[ScoredToken]) -> Body | None:
        return self._texts.chat_logprobs(tokens) if self._logprobs else None


def _call(call: Call) -> Body:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
