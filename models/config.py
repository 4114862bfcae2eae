"""One frozen description of a decoder, whatever file it came from; numbers that cannot be computed with are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from kv_common.errors import JaxkvError
from kv_kernels.provider import Activation


class ModelConfigError(JaxkvError):
    """A configuration that is missing something, contradicts itself or cannot be read."""


class UnsupportedModelError(JaxkvError):
    """A configuration that asks for arithmetic, an architecture or a format that is not implemented."""


RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` elements of a head (None: all of them; odd: and of one more).

    factor applies to linear, dynamic, llama3 and yarn; original_context to dynamic, llama3, yarn and longrope; the low
    and high factors to llama3; the betas and truncate to yarn. attention_factor multiplies rotated queries and keys.
    frequency_divisors [rotary_dim/2] divide the inverse frequencies (longrope, and llama3 as GGUF files store it);
    None is all ones. long_divisors are those of sequences beyond the original context; they, and the kind dynamic, are
    gone once the model's context is known (`models.context`).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    frequency_divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None
    rotary_dim: int | None = None
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        positive = {"theta": self.theta, "factor": self.factor, "attention_factor": self.attention_factor}
        positive |= {f"frequency factor {at}": each for at, each in enumerate(self.frequency_divisors or ())}
        positive |= {f"long frequency factor {at}": each for at, each in enumerate(self.long_divisors or ())}
        if self.kind in ("dynamic", "llama3", "yarn", "longrope"):
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
    gated: the MLP multiplies activation(gate) and up; without, it is activation(up).
    experts: the MLP is a mixture, intermediate_size is of one expert.
    num_labels: scores of a head that classifies sequences, in the place of the output matrix; 0 for neither.
    adapter_columns: ranks of all the low-rank adapters that there is room for beside the weights of a layer.
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
    gated: bool = True
    qk_norm: QkNorm = "none"
    norm_placement: NormPlacement = "before"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    experts: ExpertConfig | None = None
    adapter_columns: int = 0
    num_labels: int | None = None

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
        if self.activation == "relu2" and (self.gated or self.experts is not None):
            raise UnsupportedModelError("an MLP that relu2 gates is not implemented: use a model without it")
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
        rotated = rotary_dim + rotary_dim % 2  # half a pair is made whole, where there is room
        if not 0 < rotated <= self.head_dim:
            what = f"head_dim {self.head_dim}" if rope.rotary_dim is None else f"{rotary_dim} of {self.head_dim}"
            raise ModelConfigError(
                f"{what} is {'odd' if rotary_dim % 2 else 'out of range'}; RoPE rotates pairs of a head: check the "
                "model's config"
            )
        for divisors in (rope.frequency_divisors, rope.long_divisors):
            if divisors is not None and len(divisors) != rotated // 2:
                raise ModelConfigError(
                    f"RoPE has {len(divisors)} frequency factors, {rotated} rotated elements of a head need "
                    f"{rotated // 2}: check the file"
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
