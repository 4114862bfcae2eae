"""A request as it runs, and what its caller gets back: token by token, or whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kv_common.errors import JaxkvError
from kv_common.model_spec import ModelSpec
from kv_execution.constraints import TokenConstraint
from kv_execution.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "deadline", "nan"]


class NanLogitsError(JaxkvError):
    """A request that ended with the reason `nan`."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not numbers: weights or an adapter are damaged, get them again, or float16 "
            "overflows, use another dtype"
        )


class TokenLogprob(NamedTuple):
    """A token id and its natural-log probability in the model's own distribution."""

    token: int
    logprob: float


class TokenOutput(NamedTuple):
    """One generated token. `finish_reason` is set on a request's last; a token that stopped it is included.

    `logprob` is None where `SamplingParams.logprobs` did not ask for it. A request that ran out of time, or whose
    logits are NaN, ends with an output of no token: `token` is None.
    """

    request_id: int
    token: int | None
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    cached_tokens: int


class GenerationResult(NamedTuple):
    """Everything that one request generated; `logprobs` and `top_logprobs` are aligned with `tokens`, or empty where
    they were not asked for.

    `cached_tokens` of its tokens were not computed when it last started, since their K/V was there.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    finish_reason: FinishReason
    cached_tokens: int

    @classmethod
    def of(cls, outputs: Sequence[TokenOutput]) -> "GenerationResult":
        """The whole of a request that has ended."""
        reason = outputs[-1].finish_reason
        assert reason is not None
        return cls(
            tokens=tuple(output.token for output in outputs if output.token is not None),
            logprobs=tuple(output.logprob for output in outputs if output.logprob is not None),
            top_logprobs=tuple(output.top_logprobs for output in outputs if output.logprob is not None),
            finish_reason=reason,
            cached_tokens=outputs[-1].cached_tokens,
        )


@dataclass(eq=False)
class Request:
    """A request's life as the engine sees it, from submit to its last token."""

    request_id: int
    prompt_len: int
    max_tokens_total: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    adapter_slot: int
    constraint: TokenConstraint | None = None
    cached_tokens: int = 0
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def held_back_stops(self) -> tuple[int, ...]:
        """Stop tokens that must not come before `min_tokens` tokens are there."""
        return tuple(self.stop_token_ids) if self.params.min_tokens else ()

    @property
    def has_ended(self) -> bool:
        """Whether its last output is there."""
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    def accept(self, token: int, logprob: float | None, top_logprobs: tuple[TokenLogprob, ...]) -> TokenOutput:
        """Take the next token, -1 where there is none to choose, and say whether it is the last."""
        if token < 0:
            return self.end("nan")
        if self.constraint is not None:
            self.constraint.accept(token)
        reason: FinishReason | None = None
        if token in self.stop_token_ids:
            reason = "stop"
        elif self.prompt_len + len(self.outputs) + 1 >= self.max_tokens_total:
            reason = "length"
        output = TokenOutput(self.request_id, token, logprob, top_logprobs, reason, self.cached_tokens)
        self.outputs.append(output)
        return output

    def end(self, reason: FinishReason) -> TokenOutput:
        """End without a token."""
        output = TokenOutput(self.request_id, None, None, (), reason, self.cached_tokens)
        self.outputs.append(output)
        return output


def make_request(
    request_id: int,
    prompt_len: int,
    max_tokens_total: int,
    params: SamplingParams,
    spec: ModelSpec,
    draw_seed: Callable[[], int],
    adapter_slot: int,
    constraint: TokenConstraint | None = None,
) -> Request:
    """A request with its seed drawn, where none was given, and its stop tokens settled."""
    eos = () if params.ignore_eos else spec.eos_token_ids
    return Request(
        request_id=request_id,
        prompt_len=prompt_len,
        max_tokens_total=max_tokens_total,
        params=params,
        seed=draw_seed() if params.seed is None else params.seed,
        stop_token_ids=frozenset((*params.stop_token_ids, *eos)),
        adapter_slot=adapter_slot,
        constraint=constraint,
    )
