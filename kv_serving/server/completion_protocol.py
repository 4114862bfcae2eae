"""The body of /v1/completions."""

from typing import Annotated

from pydantic import Field

from kv_serving.server.errors import ApiError
from kv_serving.server.sampling_fields import SamplingFields

TokenIds = list[int]


def prompts_in(given: str | TokenIds | list[str] | list[TokenIds]) -> list[str | TokenIds]:
    """The prompts of a field that may have one or several."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)  # type: ignore[arg-type]


class CompletionRequest(SamplingFields):
    """Raw text, or token ids, to go on from."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | TokenIds]:
        """One entry for each prompt; token ids as they are."""
        return prompts_in(self.prompt)

    def check(self) -> None:
        """Raises ApiError for what is well-formed and not to be had."""
        self.check_stream_options()
        if self.suffix is not None:
            raise ApiError(400, "suffix is not implemented: leave it out", param="suffix")
        if self.best_of not in (None, self.choices):
            raise ApiError(400, f"best_of is {self.best_of}: leave it out, or make it n", param="best_of")
        if not self.prompts:
            raise ApiError(400, "there is no prompt: give at least one", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0: give at least 1, or set echo", param="max_tokens")
