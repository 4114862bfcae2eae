"""The fields that every kind of completion has, and what the engine is asked for by them.

Contract: a field is implemented, or has no meaning here and is accepted (`user` and the like), or is refused by name;
none is ignored. Options that are left out are the model's own defaults. Choice number i of a seeded request is sampled
with seed + i.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kv_serving.server.errors import ApiError

if TYPE_CHECKING:
    from kv_execution import SamplingParams
    from models import GenerationDefaults

MAX_STOPS = 16
_SEED_SPAN = 2**64

Number = Annotated[float, Field(allow_inf_nan=False)]


class RequestModel(BaseModel):
    """A body whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(RequestModel):
    """What a stream carries beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SamplingFields(RequestModel):
    """How to sample, for how long, and for whom."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    deadline_s: Annotated[float, Field(allow_inf_nan=False, gt=0)] | None = None
    # Without a meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def choices(self) -> int:
        """Answers asked for."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def streams(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.stream)

    def sampling_params(
        self, defaults: "GenerationDefaults", *, max_tokens: int, logprobs: bool, top_logprobs: int
    ) -> list["SamplingParams"]:
        """What to sample each choice with. Raises ApiError, SamplingParamsError."""
        from kv_execution import SamplingParams

        if (self.min_tokens or 0) > max_tokens:
            message = (
                f"min_tokens is {self.min_tokens} and max_tokens {max_tokens}: lower the first, or raise the other"
            )
            raise ApiError(400, message, param="min_tokens")

        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        common = {
            "max_tokens": max_tokens,
            "temperature": given(self.temperature, defaults.temperature),
            "top_k": max(0, given(self.top_k, defaults.top_k)),
            "top_p": given(self.top_p, defaults.top_p),
            "min_p": given(self.min_p, defaults.min_p),
            "repetition_penalty": given(self.repetition_penalty, defaults.repetition_penalty),
            "presence_penalty": given(self.presence_penalty, 0.0),
            "frequency_penalty": given(self.frequency_penalty, 0.0),
            "logit_bias": self.logit_bias or {},
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "min_tokens": self.min_tokens or 0,
            "ignore_eos": bool(self.ignore_eos),
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
        }
        first = SamplingParams(seed=self.seed, **common)
        rest = [SamplingParams(seed=_later_seed(self.seed, i), **common) for i in range(1, self.choices)]
        return [first, *rest]

    def check_stream_options(self) -> None:
        """Raises ApiError for options of a stream without a stream."""
        if self.stream_options is not None and not self.streams:
            raise ApiError(400, "stream_options is for streams: set stream to true", param="stream_options")


def _later_seed(seed: int | None, choice: int) -> int | None:
    if seed is None:
        return None
    return (seed + choice + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2
