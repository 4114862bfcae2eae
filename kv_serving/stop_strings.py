"""Ends a stream of text at the first of several stop strings, without ever showing part of one.

Contract: text that might be the beginning of a stop string is held back until it is known. The stop string that is
*complete* first wins, and of those that are complete at the same character the one that began first, so the result
does not depend on how the text was cut into pieces. The stop string itself is not part of the text.
"""

from collections.abc import Sequence

from kv_common.errors import JaxkvError


class StopStringError(JaxkvError):
    """A stop string that would stop everything."""


class StopStrings:
    """The filter of one stream. Raises StopStringError for an empty stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise StopStringError("a stop string is empty: give at least one character, or leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the stream."""

    def push(self, piece: str) -> str:
        """The text that is now certain to be shown; "" once a stop string was found."""
        if self.found is not None:
            return ""
        text, self._held = self._held + piece, ""
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, when the stream ends without a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, short of all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
