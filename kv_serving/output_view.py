"""How generated text reaches the terminal, fed piece by piece.

`OrderedView` writes prompt after prompt: the first unfinished one streams, later ones wait in memory. It needs nothing
of the terminal, so it also serves pipes and a single prompt. `LiveView` shows the ends of all answers side by side
while they are written, then leaves the same blocks behind that `OrderedView` would have written.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text


class OrderedView:
    """Writes the answers in order to `out`, each under its heading, or bare where headings is None (one prompt)."""

    def __init__(self, out: TextIO, headings: Sequence[str] | None) -> None:
        self._out = out
        self._headings = headings
        self._waiting: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._current = 0

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.flush()

    def write(self, index: int, piece: str) -> None:
        """Show `piece` of answer `index` now or when its turn comes."""
        if index == self._current:
            self._out.write(piece)
            self._out.flush()
        else:
            self._waiting.setdefault(index, []).append(piece)

    def finish(self, index: int) -> None:
        """Answer `index` is complete."""
        self._finished.add(index)
        while self._current in self._finished:
            self._out.write("\n")
            self._current += 1
            self._begin()
            self._out.write("".join(self._waiting.pop(self._current, [])))
        self._out.flush()

    def _begin(self) -> None:
        if self._headings is not None and self._current < len(self._headings):
            gap = "\n" if self._current else ""
            self._out.write(f"{gap}== {self._headings[self._current]}\n")


class LiveView:
    """Shows the last lines of every answer at once on a terminal, then writes the whole answers in order."""

    def __init__(self, console: Console, out: TextIO, headings: Sequence[str]) -> None:
        self._console = console
        self._blocks = OrderedView(out, headings)
        self._headings = headings
        self._texts = [""] * len(headings)
        self._live = Live(console=console, transient=True, refresh_per_second=12, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        with self._blocks:
            for index, text in enumerate(self._texts):
                self._blocks.write(index, text)
                self._blocks.finish(index)

    def write(self, index: int, piece: str) -> None:
        """Add `piece` to answer `index`; the next refresh shows it."""
        self._texts[index] += piece

    def finish(self, index: int) -> None:
        """Nothing changes on the screen before all are complete."""

    @staticmethod
    def fits(console: Console, prompts: int) -> bool:
        """Whether the screen has room for a heading and two lines for each prompt."""
        return console.is_terminal and not console.is_dumb_terminal and console.height >= 3 * prompts + 1

    def _render(self) -> Group:
        lines_each = max(1, (self._console.height - 1) // len(self._headings) - 1)
        parts: list[Text] = []
        for heading, text in zip(self._headings, self._texts, strict=True):
            title = Text(f"== {heading}", style="bold", no_wrap=True, overflow="ellipsis")
            parts.extend([title, *Text(text).wrap(self._console, self._console.width)[-lines_each:]])
        return Group(*parts)


def choose_view(console: Console, out: TextIO, headings: Sequence[str]) -> OrderedView | LiveView:
    """Bare streaming for one prompt; for several, side by side where `console` has the room, else block after block."""
    if len(headings) == 1:
        return OrderedView(out, None)
    return LiveView(console, out, headings) if LiveView.fits(console, len(headings)) else OrderedView(out, headings)
