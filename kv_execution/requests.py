"""What a caller gets back from a request: token by token, or whole."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kv_execution.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class TokenLogprob(NamedTuple):
    """A token id and its natural-log probability in the model's own distribution."""

    token: int
    logprob: float


class TokenOutput(NamedTuple):
    """One generated token. `finish_reason` is set on a request's last; a token that stopped it is included."""

    request_id: int
    token: int
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


class GenerationResult(NamedTuple):
    """Everything that one request generated; `logprobs` and `top_logprobs` are aligned with `tokens`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    finish_reason: FinishReason


@dataclass(eq=False)
class Request:
    """A request's life as the engine sees it, from submit to its last token."""

    request_id: int
    prompt_len: int
    max_tokens_total: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    outputs: list[TokenOutput] = field(default_factory=list)

    def accept(self, token: int, logprob: float, top_logprobs: tuple[TokenLogprob, ...]) -> TokenOutput:
        """Take the next token and say whether it is the last."""
        reason: FinishReason | None = None
        if token in self.stop_token_ids:
            reason = "stop"
        elif self.prompt_len + len(self.outputs) + 1 >= self.max_tokens_total:
            reason = "length"
        output = TokenOutput(self.request_id, token, logprob, top_logprobs, reason)
        self.outputs.append(output)
        return output
