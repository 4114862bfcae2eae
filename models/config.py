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


class ModelConfigError(JaxkvError):
    """A configuration that is missing something, contradicts itself or cannot be read."""


class UnsupportedModelError(JaxkvError):
    """A configuration that asks for arithmetic, an architecture or a format that is not implemented."""


RopeKind = Literal["default", "linear", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `factor` applies to linear and llama3, the other three to llama3 only.

    frequency_divisors [head_dim/2] divide the inverse frequencies (GGUF files store llama3 scaling that way); None is
    all ones.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    frequency_divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        positive = {"theta": self.theta, "factor": self.factor}
        if self.kind == "llama3":
            positive |= {"low_freq_factor": self.low_freq_factor, "original_context": float(self.original_context)}
            if not self.high_freq_factor > self.low_freq_factor:
                raise ModelConfigError(
                    f"llama3 RoPE needs high_freq_factor > low_freq_factor, got {self.high_freq_factor:g} and "
                    f"{self.low_freq_factor:g}: check the model's config"
                )
        for name, value in positive.items():
            if not (value > 0 and math.isfinite(value)):
                raise ModelConfigError(
                    f"RoPE {name} is {value:g}; it must be a positive number: check the model's config"
                )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the network computes; no weights, no names of files."""

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
    rope: RopeConfig = RopeConfig()
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_context",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 1: check the model's config"
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} K/V heads: check the "
                "model's config"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs: check the model's config")
        if not (self.norm_eps >= 0 and math.isfinite(self.norm_eps)):
            raise ModelConfigError(
                f"the norm's epsilon is {self.norm_eps:g}; it must be a number >= 0: check the model's config"
            )
        divisors = self.rope.frequency_divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise ModelConfigError(
                f"RoPE has {len(divisors)} frequency factors, head_dim {self.head_dim} needs "
                f"{self.head_dim // 2}: check the file"
            )


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
