"""What the front hands to the engine's thread, and what comes back.

A group is one prompt with the sampling of each of its choices, or prompts that become a vector each. Events go the
other way through a channel, which one coroutine reads. A channel needs no limit of its own: a group yields at most
`max_tokens` events for each choice.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kv_execution import SamplingParams, TokenOutput
    from kv_serving.server.grammars import GrammarConstraint


class ChoiceToken(NamedTuple):
    """The next token of choice number `choice`, which reached the host at `time_s` (monotonic)."""

    choice: int
    output: "TokenOutput"
    time_s: float


class ScoredToken(NamedTuple):
    """A token, its log-probability (None for the first of a prompt), and the likeliest (id, log-probability) there."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


class PromptScores(NamedTuple):
    """The tokens of the prompt of these choices; it comes before any of theirs."""

    choices: Sequence[int]
    tokens: Sequence[ScoredToken]


class PromptVectors(NamedTuple):
    """The vectors [prompts, hidden] of a group that pools."""

    vectors: NDArray[np.float32]


class Failure(NamedTuple):
    """A group has ended without an answer."""

    error: Exception


Event = ChoiceToken | PromptScores | PromptVectors | Failure


class EventChannel:
    """Events on their way to the one coroutine that takes them. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[Event]:
        """Wait for events, and take all there are."""
        await self._arrived.wait()
        self._arrived.clear()
        events = list(self._events)
        self._events.clear()
        return events


def put_all(deliveries: Sequence[tuple[EventChannel, Event]]) -> None:
    """Put each event in its channel."""
    for channel, event in deliveries:
        channel.put(event)


@dataclass(eq=False)
class RequestGroup:
    """One prompt, and what to sample for each choice, by the number that its events carry."""

    token_ids: Sequence[int]
    choices: Mapping[int, "SamplingParams"]
    channel: EventChannel
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    """The name of the adapter that it runs with."""
    deadline_s: float | None = None
    opening: str = ""
    """What its answers begin with, before anything is generated."""
    prompt_logprobs: int | None = None
    """How many of the likeliest to tell at each token of the prompt; None not to score it."""
    generates: bool = True
    """Whether there is anything to do once the prompt is scored."""
    constraints: Mapping[int, "GrammarConstraint"] = field(default_factory=dict)
    """What holds a choice to certain tokens, by its number."""
    submitted_s: float = 0.0
    started_s: float | None = None
    """When its first choice had a row (monotonic)."""
    request_ids: dict[int, int] = field(default_factory=dict)
    """The engine's, of the choices that have not ended; the engine's thread alone looks at it."""

    @property
    def samples(self) -> bool:
        """Whether it can go to the batcher at once."""
        return self.prompt_logprobs is None


class PoolingGroup(RequestGroup):
    """Prompts to be pooled to a vector each; nothing is generated."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: str,
        channel: EventChannel,
        *,
        cache_salt: str,
        adapter: str | None,
        deadline_s: float | None,
    ) -> None:
        super().__init__(
            (), {}, channel, cache_salt=cache_salt, adapter=adapter, deadline_s=deadline_s, generates=False
        )
        self.prompts = prompts
        self.pooling = pooling
        self.vectors: list[NDArray[np.float32]] = []
        """Those of the first prompts, which need not be computed again when the pass is."""

    @property
    def samples(self) -> bool:
        """Never."""
        return False
