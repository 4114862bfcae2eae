"""Runs a set of prompts through the batcher, hands their text on as it comes, and times prefill and decode apart.

Contract: all prompts are submitted before the first step. Prefill lasts until the last prompt has its first token;
its rate counts prompt tokens. Decode is the rest, and its rate counts only the tokens that came in that time, so
neither rate borrows work from the other. A request whose text meets a stop string is aborted and counts as `stop`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kv_serving.text_assembly import TextAssembly

if TYPE_CHECKING:
    from kv_execution import Batcher, SamplingParams


class TextSink(Protocol):
    """Takes the text of each job, by its index, as it comes."""

    def write(self, index: int, piece: str) -> None: ...

    def finish(self, index: int) -> None: ...


@dataclass(slots=True)
class Job:
    """One prompt on its way: what to submit, and the text that has come back."""

    token_ids: Sequence[int]
    params: "SamplingParams"
    assembly: TextAssembly
    adapter: str | None = None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.pieces)

    def accept(self, token: int, finish_reason: str | None) -> str:
        """Take one generated token; returns the text that it completes and sets `finish_reason` when it is the last."""
        self.tokens.append(token)
        piece = self.assembly.accept(token, finish_reason)
        self.finish_reason = self.assembly.finish_reason
        self.pieces.append(piece)
        return piece


class RunReport(NamedTuple):
    """Tokens and seconds of one run."""

    prompt_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    generated_tokens: int


def run_jobs(
    batcher: "Batcher",
    jobs: Sequence[Job],
    sink: TextSink,
    interrupted: Callable[[], bool] = lambda: False,
) -> RunReport:
    """Run every job to its end, handing each piece of text to `sink`.

    `interrupted` is asked between steps, where the engine is consistent; when it says so, what is left is aborted.

    Raises:
        JaxkvError: a job that the engine refuses, or one whose logits are NaN.
    """
    started_s = time.perf_counter()
    running = {batcher.submit(job.token_ids, job.params, adapter=job.adapter): index for index, job in enumerate(jobs)}
    decode_started_s = started_s
    decode_tokens, waiting_for_first = 0, set(running)
    while batcher.has_unfinished:
        in_decode = not waiting_for_first
        for output in batcher.step():
            if output.finish_reason == "nan":
                from kv_execution import NanLogitsError

                raise NanLogitsError
            if output.token is None or output.request_id not in running:
                continue
            waiting_for_first.discard(output.request_id)
            decode_tokens += in_decode
            index = running[output.request_id]
            sink.write(index, jobs[index].accept(output.token, output.finish_reason))
            if jobs[index].finish_reason is not None:
                batcher.abort(output.request_id)  # met a stop string; where the engine ended it, this does nothing
                del running[output.request_id]
                sink.finish(index)
        if not in_decode and not waiting_for_first:
            decode_started_s = time.perf_counter()
        if running and interrupted():
            for request_id, index in running.items():
                batcher.abort(request_id)
                jobs[index].finish_reason = "abort"
                sink.finish(index)
            break
    ended_s = time.perf_counter()
    if waiting_for_first:
        decode_started_s = ended_s
    return RunReport(
        prompt_tokens=sum(len(job.token_ids) for job in jobs),
        prefill_s=decode_started_s - started_s,
        decode_tokens=decode_tokens,
        decode_s=ended_s - decode_started_s,
        generated_tokens=sum(len(job.tokens) for job in jobs),
    )
