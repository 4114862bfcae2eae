"""How much one client, and all of them together, may ask for."""

from dataclasses import dataclass, fields

from kv_common.errors import JaxkvError
from kv_serving.server.errors import ApiError, too_many


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
    """Counts the requests that are being answered. Used on the event loop's thread only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.active = 0

    def __enter__(self) -> None:
        """Raises ApiError where there are too many."""
        if self.active >= self._most:
            raise too_many(f"{self.active} requests are being answered, which is the most; try again soon")
        self.active += 1

    def __exit__(self, *_: object) -> None:
        self.active -= 1
