"""Splits an answer into text and calls of tools, as it comes.

Contract: what is returned, joined, does not depend on how the text was cut. A call is returned once it is whole; text
that looked like the beginning of one and is not comes out as text. Space around calls belongs to them.
"""

from typing import NamedTuple

from kv_serving.server.tool_formats import Call, ToolFormat

_PYTHON_TAG = "<|python_tag|>"


class Read(NamedTuple):
    """What is certain now."""

    text: str
    calls: list[Call]


class ToolCallReader:
    """One answer in one notation."""

    def __init__(self, notation: ToolFormat) -> None:
        self._notation = notation
        self._held = ""
        self._inside = False
        self._is_text = False
        self.found = False
        """Whether there was any call."""

    def push(self, piece: str) -> Read:
        """Take more text."""
        self._held += piece
        if not self._notation.opening:
            return self._push_whole()
        text = ""
        calls: list[Call] = []
        while True:
            if not self._inside:
                text += self._before_opening()
            if not self._inside:
                return Read(text, calls)
            closing = self._notation.closing
            end = self._held.find(closing) if closing else -1
            if end < 0:
                return Read(text, calls)
            body, self._held = self._held[:end], self._held[end + len(closing) :]
            self._inside = False
            read = self._read(body, f"{self._notation.opening}{body}{closing}")
            text += read.text
            calls += read.calls

    def finish(self) -> Read:
        """The answer has ended."""
        held, self._held = self._held, ""
        if self._inside:
            return self._read(held, self._notation.opening + held)
        if not self._notation.opening and not self._is_text:
            return self._read(held.strip().removeprefix(_PYTHON_TAG), held)
        return Read("" if self.found and not held.strip() else held, [])

    def _read(self, body: str, raw: str) -> Read:
        calls = self._notation.calls_of(body)
        if calls is None:
            return Read(raw, [])
        self.found = True
        return Read("", calls)

    def _push_whole(self) -> Read:
        """An answer that is nothing but calls is seen by how it begins, and read when it ends."""
        start = self._held.lstrip()
        if not self._is_text and (start.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(start)):
            return Read("", [])
        self._is_text = True
        text, self._held = self._held, ""
        return Read(text, [])

    def _before_opening(self) -> str:
        """Text up to the next opening, if there is one; what may belong to it stays."""
        opening, held = self._notation.opening, self._held
        at = held.find(opening)
        if at >= 0:
            self._held, self._inside = held[at + len(opening) :], True
            return held[:at].rstrip()
        keep = next((n for n in range(min(len(held), len(opening) - 1), 0, -1) if held.endswith(opening[:n])), 0)
        sure = held[: len(held) - keep].rstrip()
        self._held = held[len(sure) :]
        return sure
