"""The text of one answer, from its tokens as they come.

Contract: pieces are never taken back, never break a character, and hold back only the longest end that a stop string
could begin with; joined they are the whole answer, however the tokens were grouped. A token that stopped the answer is
no part of its text. Stop strings count only once `min_tokens` tokens are there.
"""

from collections.abc import Iterable
from typing import Protocol

from kv_serving.stop_strings import StopStrings


class TokenDecoder(Protocol):
    """Turns token ids into text as they come, holding back characters that are not complete."""

    def feed(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class TextAssembly:
    """One answer on its way to being text."""

    def __init__(self, decoder: TokenDecoder, stops: StopStrings, min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._stops = stops
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stopped_by: int | str | None = None
        """The token id or stop string that ended the answer, where one of those did."""

    def accept(self, token: int | None, finish_reason: str | None) -> str:
        """Take one generated token, None for an end without one; returns the text that is certain now and sets
        `finish_reason` when it is the last.
        """
        piece = ""
        if token is not None:
            self.num_tokens += 1
            if finish_reason == "stop":
                self.stopped_by = token
            else:
                piece = self._push(self._decoder.feed((token,)))
        if finish_reason is not None and not self._stops.found:
            piece += self._push(self._decoder.finish())
            piece += self._stops.finish()
        self.finish_reason = "stop" if self._stops.found else finish_reason
        if self._stops.found:
            self.stopped_by = self._stops.found
        return piece

    def _push(self, text: str) -> str:
        return text if self.num_tokens < self._min_tokens else self._stops.push(text)
