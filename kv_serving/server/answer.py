"""The answers to one request, while they come: events of the engine in, pieces of text out.

Contract: `pieces` yields what is new of a choice, and the pieces of a choice joined are its whole answer. When it ends,
for whatever reason, what still runs for it is aborted and its place is free. It is read once.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kv_execution.requests import NanLogitsError
from kv_serving.server.endings import DeadlineError
from kv_serving.server.engine_loop import EngineLoop
from kv_serving.server.errors import ApiError, api_error_of
from kv_serving.server.grammars import GrammarError
from kv_serving.server.limits import Concurrency
from kv_serving.server.request_group import ChoiceToken, EventChannel, Failure, PromptScores, RequestGroup, ScoredToken
from kv_serving.server.server_metrics import ServerMetrics
from kv_serving.text_assembly import TextAssembly

if TYPE_CHECKING:
    from kv_execution import TokenOutput

logger = logging.getLogger(__name__)


class Usage(NamedTuple):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, object]:
        """As OpenAI's API has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Piece(NamedTuple):
    """What is new of a choice; the reasons are set on its last."""

    choice: int
    text: str
    tokens: Sequence[ScoredToken]
    finish_reason: str | None
    stop_reason: int | str | None


class _Choice:
    """One answer that has not ended."""

    def __init__(self, group: RequestGroup, assembly: TextAssembly) -> None:
        self.group = group
        self.assembly = assembly
        self.text = group.opening
        self.tokens: list[ScoredToken] = []
        self.last_token_s: float | None = None

    def accept(self, output: "TokenOutput") -> None:
        self.text += self.assembly.accept(output.token, output.finish_reason)
        if output.token is not None and output.logprob is not None:
            self.tokens.append(ScoredToken(output.token, output.logprob, output.top_logprobs))


class Answer:
    """The choices of `groups`, by number; it counts in `concurrency` while it is read."""

    def __init__(
        self,
        engine: EngineLoop,
        metrics: ServerMetrics,
        channel: EventChannel,
        groups: Sequence[RequestGroup],
        assemblies: Sequence[TextAssembly],
        concurrency: Concurrency,
        model: str,
    ) -> None:
        """`model` is what the request calls the model."""
        self._engine = engine
        self._metrics = metrics
        self._channel = channel
        self._groups = groups
        self._concurrency = concurrency
        self._open = {choice: _Choice(group, assemblies[choice]) for group in groups for choice in group.choices}
        self._completion_tokens = 0
        self._cached_tokens = {id(group): 0 for group in groups}
        self.num_choices = len(self._open)
        self._model = model
        self._finish_reasons: list[str] = []
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._error: str | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            sum(len(group.token_ids) for group in self._groups),
            self._completion_tokens,
            sum(self._cached_tokens.values()),
        )

    def facts(self) -> dict[str, object]:
        """What the log and the traces tell of it; times are in seconds from its submission."""
        first = self._groups[0]
        params = first.choices[min(first.choices)]

        def since(time_s: float | None) -> float | None:
            return None if time_s is None else round(time_s - first.submitted_s, 4)

        facts = {
            "model": self._model,
            **self.usage._asdict(),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "finish_reasons": self._finish_reasons,
            "queue_s": since(first.started_s),
            "first_token_s": since(self._first_token_s),
            "e2e_s": since(self._last_token_s),
        }
        return facts if self._error is None else {**facts, "error": self._error}

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new, until every choice has ended. Raises ApiError."""
        with self._concurrency.hold(self._channel), self._running():
            while self._open:
                changed: dict[int, _Choice] = {}
                for event in await self._channel.take():
                    if isinstance(event, Failure):
                        raise self._failed(event.error) from event.error
                    if isinstance(event, PromptScores):
                        changed |= self._scored(event)
                        continue
                    assert isinstance(event, ChoiceToken)
                    choice = self._open.get(event.choice)
                    if choice is not None and choice.assembly.finish_reason is None:
                        self._accept(choice, event)
                        changed[event.choice] = choice
                for number, choice in changed.items():
                    if choice.text or choice.assembly.finish_reason is not None:
                        yield self._piece(number, choice)

    def _failed(self, error: Exception) -> ApiError:
        told = api_error_of(error)
        self._error = told.code
        return told

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        try:
            for group in self._groups:
                self._metrics.prompt(len(group.token_ids))
                self._engine.submit(group)
            yield
        finally:
            if self._open:
                self._metrics.aborted(len(self._open))
                for group in self._groups:
                    self._engine.abort(group)

    def _accept(self, choice: _Choice, event: ChoiceToken) -> None:
        output = event.output
        if output.finish_reason == "nan":
            logger.error("%s", error := NanLogitsError())
            raise self._failed(error)
        if output.token is None and choice.assembly.num_tokens == 0:
            raise self._failed(DeadlineError("the request ran out of time before its first token"))
        choice.accept(output)
        if event.choice == min(choice.group.choices):  # the others share its prompt
            self._cached_tokens[id(choice.group)] = output.cached_tokens
        if output.token is not None:
            self._completion_tokens += 1
            self._metrics.token(choice.group, choice.last_token_s, event.time_s)
            choice.last_token_s = self._last_token_s = event.time_s
            self._first_token_s = self._first_token_s or event.time_s
        if choice.assembly.finish_reason is not None and output.finish_reason is None:
            self._engine.abort(choice.group, event.choice)  # it met a stop string, of which the engine knows nothing

    def _scored(self, event: PromptScores) -> dict[int, _Choice]:
        """Begin the answers with their prompt; where nothing is to be generated, that is all of them."""
        ended = {}
        for number in event.choices:
            choice = self._open[number]
            choice.tokens.extend(event.tokens)
            if not choice.group.generates:
                choice.assembly.accept(None, "length")
                ended[number] = choice
        return ended

    def _piece(self, number: int, choice: _Choice) -> Piece:
        assembly = choice.assembly
        reason, stop_reason = assembly.finish_reason, assembly.stopped_by
        if reason is not None:
            del self._open[number]
            constraint = choice.group.constraints.get(number)
            if constraint is not None and constraint.failure is not None:
                raise self._failed(GrammarError(f"the form is too much to keep to ({constraint.failure}): simplify it"))
            if reason == "deadline":  # for which OpenAI's API has no word
                reason, stop_reason = "length", "deadline"
            self._finish_reasons.append(reason)
            self._metrics.finished(choice.group, reason, choice.last_token_s, assembly.num_tokens)
        piece = Piece(number, choice.text, choice.tokens, reason, stop_reason)
        choice.text, choice.tokens = "", []
        return piece
