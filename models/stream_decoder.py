"""Text of a growing sequence, piece by piece, never taking anything back.

A token can end inside a character, so a piece is held until what it ends in is complete. Only a short window of tokens
is decoded again, the last piece's and those held, so the cost per token does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from models.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Text of a sequence as its tokens arrive: the pieces joined, `finish` included, are `decode` of all the ids.

    A piece is held back while it ends in an incomplete character, so nothing emitted is ever taken back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []  # the last piece's tokens, for context, and those not emitted yet
        self._emitted = 0  # how many of the window's tokens are out

    def feed(self, ids: Iterable[int]) -> str:
        """The text that became certain with these token ids; empty while a character is incomplete."""
        # A model may have more rows of embeddings than its tokenizer has tokens; those mean nothing.
        self._window.extend(token for token in ids if token < self._tokenizer.vocab_size)
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE) or not self._tokenizer.completes_text(self._window[-1]):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return piece

    def finish(self) -> str:
        """What was held back, incomplete characters as U+FFFD. The decoder is then at its beginning again."""
        piece = self._pending()
        self._window, self._emitted = [], 0
        return piece

    def _pending(self) -> str:
        whole = self._tokenizer.decode(self._window, skip_special=self._skip_special)
        emitted = self._tokenizer.decode(self._window[: self._emitted], skip_special=self._skip_special)
        return whole[len(emitted) :]
