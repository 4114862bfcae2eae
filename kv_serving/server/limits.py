"""How much one client, and all of them together, may ask for."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields

from kv_common.errors import JaxkvError
from kv_serving.server.errors import ApiError, api_error_of, too_many
from kv_serving.server.request_group import EventChannel, Failure


class LimitError(JaxkvError):
    """A limit that is out of range."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may be.

    Attributes:
        max_body_bytes: bytes of a body.
        max_prompt_tokens: tokens of a prompt; None for as many as the context holds.
        max_tokens: tokens of an answer, which is also the most that a request without a number gets; None for as many
            as fit.
        max_choices: answers of one request, over all of its prompts.
        max_concurrent: requests at once; more are told to come back.
        deadline_s: seconds that a request may take; None for any time.
    """

    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_choices: int = 128
    max_concurrent: int = 256
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise LimitError(f"{field.name} is {value}; give more than 0")

    def check_choices(self, choices: int) -> None:
        """Raises ApiError."""
        if choices > self.max_choices:
            raise ApiError(400, f"the request asks for {choices} answers and may for {self.max_choices}", param="n")

    def check_prompt(self, tokens: int) -> None:
        """Raises ApiError."""
        if self.max_prompt_tokens is not None and tokens > self.max_prompt_tokens:
            raise ApiError(
                400,
                f"the prompt has {tokens} tokens and may have {self.max_prompt_tokens}; shorten it",
                code="context_length_exceeded",
            )

    def check_max_tokens(self, asked: int) -> None:
        """Raises ApiError."""
        if self.max_tokens is not None and asked > self.max_tokens:
            raise ApiError(400, f"max_tokens is {asked} and may be {self.max_tokens}; lower it", param="max_tokens")

    def deadline_of(self, asked: float | None) -> float | None:
        """Seconds that a request gets, which asked for `asked`."""
        given = [seconds for seconds in (asked, self.deadline_s) if seconds is not None]
        return min(given) if given else None


class Concurrency:
    """Counts the requests that are being answered, and can end them all. Used on the event loop's thread only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._channels: set[EventChannel] = set()
        self._ended: Failure | None = None

    @property
    def active(self) -> int:
        """How many there are."""
        return len(self._channels)

    @contextlib.contextmanager
    def hold(self, channel: EventChannel) -> Iterator[None]:
        """Count the request whose events come by `channel`. Raises ApiError where there are too many, and the error of
        `end` after that.
        """
        if self._ended is not None:
            raise api_error_of(self._ended.error)
        if self.active >= self._most:
            raise too_many(f"{self.active} requests are being answered, which is the most; try again soon")
        self._channels.add(channel)
        try:
            yield
        finally:
            self._channels.remove(channel)

    def end(self, error: Exception) -> None:
        """Fail all of them, whatever the engine does, and whoever comes later."""
        self._ended = Failure(error)
        for channel in self._channels:
            channel.put(self._ended)
