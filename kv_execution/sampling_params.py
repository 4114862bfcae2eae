"""What one request asks of the sampler: a plain value, complete and checked once it is constructed.

Contract: nothing downstream checks these numbers again, and every accepted number survives the float32 arithmetic on
the device, so a NaN, an infinity or a value that would overflow there is refused here with its range. Ranges follow
OpenAI's API where it has the parameter. Ids cannot be compared with a vocabulary here; `check_vocabulary` does that at
submission. `seed=None` leaves the choice of a seed to the engine, which makes one up per request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from numbers import Integral, Real
from types import MappingProxyType
from typing import NamedTuple

from kv_common.errors import JaxkvError

MAX_LOGIT_BIAS = 300
"""Entries that one request's logit_bias may have."""

MAX_TOP_LOGPROBS = 20
"""Most likely alternatives that one request may ask for at each position."""

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them leaves the range of float32 and no randomness."""

_INT32_MAX = 2**31 - 1
_INTEGER_RANGES = {
    "max_tokens": (1, _INT32_MAX),
    "top_k": (0, _INT32_MAX),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "min_tokens": (0, _INT32_MAX),
}
_REAL_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_LOGIT_BIAS_RANGE = (-100.0, 100.0)
_SEED_RANGE = (-(2**63), 2**63 - 1)


class SamplingParamsError(JaxkvError):
    """A sampling parameter outside its range or of the wrong type."""


class SeedWords(NamedTuple):
    """A 64-bit seed as the device takes it: two unsigned 32-bit integers, in this order."""

    high: int
    low: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next tokens of one request.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: divides the logits; 0 (and anything below 1e-5) takes the most likely token.
        top_k: keeps the k most likely tokens and whatever ties with the last of them; 0 is off.
        top_p: keeps the fewest most likely tokens whose probabilities reach this sum; 1 is off.
        min_p: keeps tokens at least this fraction as likely as the most likely one; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of every token seen so far; 1 is off.
        presence_penalty, frequency_penalty: subtracted from the logit of a generated token, once and per occurrence.
        logit_bias: added to the logits of these token ids.
        seed: the tokens depend on it and their positions only; any signed 64-bit integer, None for a fresh one.
        stop_token_ids: each ends the generation, beside the model's own end-of-sequence tokens.
        min_tokens: no stop token, the model's own included, is chosen before so many tokens are there.
        ignore_eos: generate on past the model's own end-of-sequence tokens.
        logprobs: return the natural-log probability of every generated token.
        top_logprobs: and of so many most likely tokens; more than 0 implies `logprobs`.

    Raises:
        SamplingParamsError: a number outside its range, a NaN, an infinity, or a value of the wrong type.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, integer_range in _INTEGER_RANGES.items():
            self._set(name, _integer(name, getattr(self, name), integer_range))
        for name, real_range in _REAL_RANGES.items():
            self._set(name, _real(name, getattr(self, name), real_range))
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(f"{name} is {getattr(self, name)!r}: give True or False")
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, _SEED_RANGE))
        self._set("logit_bias", _checked_bias(self.logit_bias))
        self._set("stop_token_ids", _checked_stop_ids(self.stop_token_ids))
        self._set("logprobs", self.logprobs or self.top_logprobs > 0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, so that the seed does not matter."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token is all that is asked for, of logits as they are."""
        return (
            self.is_greedy
            and self.repetition_penalty == 1
            and self.presence_penalty == self.frequency_penalty == 0
            and not self.logit_bias
            and not self.min_tokens
            and not self.logprobs
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that a vocabulary of `vocab_size` tokens does not have.

        Raises:
            SamplingParamsError: an id of logit_bias or stop_token_ids is `vocab_size` or more.
        """
        for name, ids in (("logit_bias", tuple(self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            if ids and max(ids) >= vocab_size:
                raise SamplingParamsError(
                    f"{name} has token id {max(ids)}, the model knows {vocab_size} tokens: "
                    f"give ids from 0 to {vocab_size - 1}"
                )


def seed_words(seed: int) -> SeedWords:
    """Split a signed 64-bit seed; a negative one in two's complement."""
    return SeedWords(high=(seed >> 32) & 0xFFFFFFFF, low=seed & 0xFFFFFFFF)


def _integer(name: str, value: object, bounds: tuple[int, int]) -> int:
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SamplingParamsError(f"{name} is {value!r}: give an integer from {low} to {high}")
    number = int(value)
    if not low <= number <= high:
        raise SamplingParamsError(f"{name} is {number}: give an integer from {low} to {high}")
    return number


def _real(name: str, value: object, bounds: tuple[float, float]) -> float:
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SamplingParamsError(f"{name} is {value!r}: give a number from {low:g} to {high:g}")
    try:
        number = float(value)
    except OverflowError:
        number = inf
    if not isfinite(number) or not low <= number <= high:
        raise SamplingParamsError(f"{name} is {number:g}: give a number from {low:g} to {high:g}")
    return number


def _checked_bias(logit_bias: object) -> Mapping[int, float]:
    if not isinstance(logit_bias, Mapping):
        raise SamplingParamsError(f"logit_bias is a {type(logit_bias).__name__}: give a mapping of token id to bias")
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise SamplingParamsError(f"logit_bias has {len(logit_bias)} entries: give at most {MAX_LOGIT_BIAS}")
    # A private copy behind a read-only view: a frozen value must not change when the caller's dictionary does.
    return MappingProxyType(
        {
            _integer("a token id of logit_bias", token, (0, _INT32_MAX)): _real(
                f"the logit_bias of token {token}", bias, _LOGIT_BIAS_RANGE
            )
            for token, bias in logit_bias.items()
        }
    )


def _checked_stop_ids(stop_token_ids: object) -> tuple[int, ...]:
    if not isinstance(stop_token_ids, (tuple, list, set, frozenset)):
        raise SamplingParamsError(f"stop_token_ids is {stop_token_ids!r}: give a tuple of token ids")
    return tuple(_integer("a token id of stop_token_ids", token, (0, _INT32_MAX)) for token in stop_token_ids)
