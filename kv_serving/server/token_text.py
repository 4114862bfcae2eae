"""Tokens as log-probabilities name them: their text, and their bytes.

A token that is part of a character has no text of its own; it is written `bytes:\\xe2\\x80`, as OpenAI's API does.
"""

import codecs
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kv_serving.server.request_group import ScoredToken

if TYPE_CHECKING:
    from models import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for -inf, which JSON cannot say."""


class TokenTexts:
    """The vocabulary as text."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self.text = functools.lru_cache(maxsize=65_536)(self._text)

    def bytes_of(self, token: int) -> bytes:
        """What `token` adds to the text; nothing where the tokenizer does not have it."""
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.vocab_size else b""

    def may_be_left_out(self, token: int) -> bool:
        """Whether `token` is special, so that a text need not have it."""
        return token < self._tokenizer.vocab_size and not self._tokenizer.decode([token])

    def completion_logprobs(self, tokens: Sequence[ScoredToken], offsets: Sequence[int]) -> dict[str, Any]:
        """The `logprobs` of a choice of /v1/completions, whose tokens begin at the characters `offsets` of its text."""
        return {
            "tokens": [self.text(each.token) for each in tokens],
            "token_logprobs": [None if each.logprob is None else finite(each.logprob) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": list(offsets),
        }

    def chat_logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """The `logprobs` of a choice of /v1/chat/completions."""
        return {
            "content": [
                {
                    **self._entry(each.token, each.logprob or 0.0),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in each.top],
                }
                for each in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(self.bytes_of(token))}

    def _top(self, each: ScoredToken) -> dict[str, float] | None:
        if each.logprob is None:
            return None
        # Of tokens that are written alike the likeliest counts; the token itself is always there.
        top = {self.text(token): finite(logprob) for token, logprob in reversed(each.top)}
        return top if self.text(each.token) in top else {**top, self.text(each.token): finite(each.logprob)}

    def _text(self, token: int) -> str:
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters, while it comes; a token inside a character is
    where that begins.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0
        self._told = 0

    def take(self, tokens: Sequence[ScoredToken], text: str) -> list[int]:
        """The offsets of the tokens that come with the next piece, `text`."""
        offsets = []
        for each in tokens:
            offsets.append(self._next)
            self._next += len(self._decoder.decode(self._shown(each.token, text)))
        self._told += len(text)
        return offsets

    def _shown(self, token: int, text: str) -> bytes:
        """The bytes of a token, less what is not in the text: special tokens, and the space before all of it."""
        data, begin = self._texts.bytes_of(token), max(0, self._next - self._told)
        if self._texts.may_be_left_out(token) and not text.startswith(self._texts.text(token), begin):
            return b""
        return data[1:] if self._next == 0 and data[:1] == b" " and not text.startswith(" ") else data


def finite(logprob: float) -> float:
    """`logprob` as JSON can say it."""
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
