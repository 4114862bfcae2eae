"""The conversation of `jaxkv chat`: reads a line, streams the reply, keeps the history.

Contract: Ctrl-C during a reply stops the reply and keeps what was said; it is noticed between steps, because an
exception inside a step could leave the engine's donated pools unbound. A message that is refused (too long, say) is
reported in one line and taken back, and the conversation goes on.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from kv_common.errors import JaxkvError
from kv_serving.generation_run import RunReport, run_jobs
from kv_serving.output_view import OrderedView
from kv_serving.session import Message, encode_chat, make_job

if TYPE_CHECKING:
    from kv_execution import Batcher, SamplingParams
    from models import LoadedModel

HELP = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops a reply"


class ChatRepl:
    """One conversation with `model`, on `batcher`; `read_line` returns what the user typed or raises EOFError."""

    def __init__(
        self,
        model: "LoadedModel",
        batcher: "Batcher",
        params: "SamplingParams",
        *,
        stops: Sequence[str] = (),
        system: str | None = None,
        out: TextIO,
        read_line: Callable[[], str],
    ) -> None:
        self._model = model
        self._batcher = batcher
        self._params = params
        self._stops = stops
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._out = out
        self._read_line = read_line
        self.messages: list[Message] = list(self._opening)

    def run(self) -> None:
        """Talk until /exit or the end of input."""
        while True:
            try:
                line = self._read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say(f"\n{HELP}")
                continue
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self._opening)
                self._say("a new conversation begins")
            elif line.startswith("/"):
                self._say(HELP)
            elif line:
                self._answer(line)

    def reply(self, text: str) -> RunReport:
        """Stream the reply to `text` and remember both; raises JaxkvError, and remembers neither, when refused."""
        messages = [*self.messages, {"role": "user", "content": text}]
        job = make_job(self._model, encode_chat(self._model, messages), self._params, self._stops)
        with OrderedView(self._out, None) as view, interruptible() as interrupted:
            report = run_jobs(self._batcher, [job], view, interrupted)
        self.messages = [*messages, {"role": "assistant", "content": job.text}]
        return report

    def _answer(self, line: str) -> None:
        try:
            self.reply(line)
        except JaxkvError as error:
            self._say(f"jaxkv: {error}")

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it the first Ctrl-C only makes the yielded function return True; a second one raises KeyboardInterrupt."""
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
