"""One frozen description of a decoder, whatever file it came from, and the reader that refuses what it cannot honor.

A configuration that is half understood gives fluent, wrong text. So every field must be consumed, known to be harmless,
or switched off (None, False, empty); anything else is refused by name. `ConfigFields` keeps the account: families take
the fields they implement and call `refuse_unread` at the end.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from kv_common.errors import JaxkvError
from kv_kernels.provider import Activation


class ModelConfigError(JaxkvError):
    """A configuration that is missing something, contradicts itself or cannot be read."""


class UnsupportedModelError(JaxkvError):
    """A configuration that asks for arithmetic, an architecture or a format that is not implemented."""


RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` elements of a head (None: all of them).

    factor applies to linear, llama3 and yarn; original_context to llama3, yarn and longrope; the low and high factors
    to llama3; the betas and truncate to yarn. attention_factor multiplies the rotated queries and keys.
    frequency_divisors [rotary_dim/2] divide the inverse frequencies (longrope, and llama3 as GGUF files store it);
    None is all ones.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    frequency_divisors: tuple[float, ...] | None = None
    rotary_dim: int | None = None
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        positive = {"theta": self.theta, "factor": self.factor, "attention_factor": self.attention_factor}
        positive |= {f"frequency factor {at}": each for at, each in enumerate(self.frequency_divisors or ())}
        if self.kind in ("llama3", "yarn", "longrope"):
            positive |= {"original_context": float(self.original_context)}
        if self.kind == "llama3":
            positive |= {"low_freq_factor": self.low_freq_factor}
            if not self.high_freq_factor > self.low_freq_factor:
                raise ModelConfigError(
                    f"llama3 RoPE needs high_freq_factor > low_freq_factor, got {self.high_freq_factor:g} and "
                    f"{self.low_freq_factor:g}: check the model's config"
                )
        if self.kind == "yarn":
            positive |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "theta - 1": self.theta - 1}
        for name, value in positive.items():
            if not (value > 0 and math.isfinite(value)):
                raise ModelConfigError(
                    f"RoPE {name} is {value:g}; it must be a positive number: check the model's config"
                )


MAX_LAYERS = 4096
"""More than any model has; a damaged file may say billions."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What layers of one model differ in.

    window: keys that a query sees, its own included; None sees all. rope: None does not rotate.
    """

    window: int | None = None
    rope: RopeConfig | None = RopeConfig()


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """A mixture of `count` experts of which a token takes `chosen`; `renormalize`: their weights sum to one."""

    count: int
    chosen: int
    renormalize: bool = True


QkNorm = Literal["none", "head", "projection"]
NormPlacement = Literal["before", "after", "both"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the network computes; no weights, no names of files.

    layer_kinds: one for each layer; a single one stands for all of them.
    attention_scale: None is head_dim ** -0.5. attention_bias is of q, k and v, output_bias of o.
    qk_norm: RMSNorm of queries and keys, each head alone or the whole projection.
    norm_placement: RMSNorm of what goes into attention and MLP, of what comes out, or both.
    experts: the MLP is a mixture, intermediate_size is of one expert.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    layer_kinds: tuple[LayerKind, ...] = (LayerKind(),)
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    activation: Activation = "silu"
    qk_norm: QkNorm = "none"
    norm_placement: NormPlacement = "before"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    experts: ExpertConfig | None = None

    def __post_init__(self) -> None:
        if self.num_layers > MAX_LAYERS:  # before anything is made for each of them
            raise ModelConfigError(f"num_layers is {self.num_layers}, at most {MAX_LAYERS}: check the model's config")
        if len(self.layer_kinds) == 1:
            object.__setattr__(self, "layer_kinds", self.layer_kinds * self.num_layers)
        for name, size in self._sizes().items():
            if size < 1:
                raise ModelConfigError(f"{name} is {size}; it must be at least 1: check the model's config")
        for name, value in self._positive().items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ModelConfigError(f"{name} is {value:g}; it must be a positive number: check the model's config")
        if len(self.layer_kinds) != self.num_layers:
            raise ModelConfigError(
                f"{len(self.layer_kinds)} kinds of layers are given for {self.num_layers} layers: check the "
                "model's config"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} K/V heads: check the "
                "model's config"
            )
        if self.experts is not None and self.experts.chosen > self.experts.count:
            raise ModelConfigError(
                f"a token chooses {self.experts.chosen} of {self.experts.count} experts: check the model's config"
            )
        if not (self.norm_eps >= 0 and math.isfinite(self.norm_eps)):
            raise ModelConfigError(
                f"the norm's epsilon is {self.norm_eps:g}; it must be a number >= 0: check the model's config"
            )
        for rope in {kind.rope for kind in self.layer_kinds if kind.rope is not None}:
            self._check_rope(rope)

    def _check_rope(self, rope: RopeConfig) -> None:
        rotary_dim = self.head_dim if rope.rotary_dim is None else rope.rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim:
            what = f"head_dim {self.head_dim}" if rope.rotary_dim is None else f"{rotary_dim} of {self.head_dim}"
            raise ModelConfigError(
                f"{what} is {'odd' if rotary_dim % 2 else 'out of range'}; RoPE rotates pairs of a head: check the "
                "model's config"
            )
        if rope.frequency_divisors is not None and len(rope.frequency_divisors) != rotary_dim // 2:
            raise ModelConfigError(
                f"RoPE has {len(rope.frequency_divisors)} frequency factors, {rotary_dim} rotated elements of a head "
                f"need {rotary_dim // 2}: check the file"
            )

    def _sizes(self) -> dict[str, int]:
        names = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
            "max_context",
        )
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}
        sizes["the smallest window"] = min((window for window in self.windows if window is not None), default=1)
        if self.experts is not None:
            sizes |= {"the number of experts": self.experts.count, "experts per token": self.experts.chosen}
        return sizes

    def _positive(self) -> dict[str, float | None]:
        names = ("attention_scale", "attention_soft_cap", "logit_soft_cap", "embedding_multiplier")
        return {name: getattr(self, name) for name in (*names, "residual_multiplier", "logit_divisor")}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(kind.window for kind in self.layer_kinds)


_REQUIRED = object()


class ConfigFields:
    """The fields of one configuration object, and which of them somebody has read.

    `origin` names it in messages, e.g. `config.json` or `config.json's rope_parameters`.
    """

    def __init__(self, fields: Mapping[str, Any], origin: str) -> None:
        self._fields = dict(fields)
        self._unread = set(fields)
        self.origin = origin

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def states(self, name: str) -> bool:
        """Whether the file says anything about `name`, if only null."""
        return name in self._fields

    def supply(self, name: str, value: Any) -> None:
        """Fill in a field that the file leaves to be derived."""
        self._fields[name] = value
        self._unread.add(name)

    def peek(self, name: str) -> Any:
        """The raw value of `name`, or None; does not count as read."""
        return self._fields.get(name)

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of `name` as `kind`; `default` where it is absent or null.

        Raises:
            ModelConfigError: it is required and absent, or of another type.
        """
        self._unread.discard(name)
        value = self._fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelConfigError(f"{self.origin} has no {name}: the file is incomplete, get it again")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError as error:
                raise ModelConfigError(f"{self.origin} has {name} beyond any float: fix the file") from error
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelConfigError(f"{self.origin} has {name}={_short(value)}, expected {kind.__name__}: fix the file")
        return value

    def skip(self, *names: str) -> None:
        """Count fields as read that change nothing for this family, whatever they say."""
        self._unread.difference_update(names)

    def require(self, name: str, *allowed: Any) -> None:
        """Accept `name` only where it is absent, null or one of `allowed`, the values that are implemented."""
        self._unread.discard(name)
        value = self._fields.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(_short(each) for each in allowed) or "none"
            raise UnsupportedModelError(
                f"{self.origin} has {name}={_short(value)}, implemented is {wanted}: use a model without it"
            )

    def refuse_unread(self, harmless: frozenset[str]) -> None:
        """Refuse the first field that nobody read, that is switched on and that is not known to be `harmless`."""
        for name in sorted(self._unread - harmless):
            value = self._fields[name]
            if value is None or value is False or value in ([], {}, ""):
                continue
            raise UnsupportedModelError(
                f"{self.origin} sets {name}={_short(value)}, which is not implemented: use a model without it"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelConfigError: unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ModelConfigError(f"{path} is not JSON ({error}): get the file again") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds a {type(value).__name__}, expected an object: get the file again")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
