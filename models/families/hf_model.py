"""config.json read the way every family reads it: sizes, RoPE in either layout, windows.

A family takes the fields that are its own and hands what it found to `decoder_config`, which takes the rest and refuses
whatever nobody took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from models.config import DecoderConfig, LayerKind, ModelConfigError, RopeConfig, UnsupportedModelError
from models.config_fields import ConfigFields, shortened
from models.harmless_fields import HARMLESS_FIELDS

_SLIDING, _FULL = "sliding_attention", "full_attention"


def head_dim_of(fields: ConfigFields) -> int:
    """Elements of a head: stated, or the hidden size over the heads."""
    hidden_size, num_heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    stated = fields.take("head_dim", int, None)
    if num_heads < 1 or (stated is None and hidden_size % num_heads):
        raise ModelConfigError(
            f"hidden_size {hidden_size} does not divide into {num_heads} heads: check {fields.origin}"
        )
    return hidden_size // num_heads if stated is None else stated


def decoder_config(
    fields: ConfigFields, architecture: str, layer_kinds: Sequence[LayerKind], **settings: Any
) -> DecoderConfig:
    """A DecoderConfig from the fields that every family has, and the family's own `settings`.

    Raises:
        ModelConfigError, UnsupportedModelError: a field is missing, contradicts another, or nobody read it.
    """
    if "activation" not in settings:
        fields.require("hidden_act", "silu")
    fields.require("is_causal", True)  # false is not off
    num_heads = fields.take("num_attention_heads", int)
    config = DecoderConfig(
        **{
            "architecture": architecture,
            "vocab_size": fields.take("vocab_size", int),
            "hidden_size": fields.take("hidden_size", int),
            "intermediate_size": fields.take("intermediate_size", int),
            "num_layers": fields.take("num_hidden_layers", int),
            "num_heads": num_heads,
            "num_kv_heads": fields.take("num_key_value_heads", int, num_heads),
            "head_dim": head_dim_of(fields),
            "max_context": _positions(fields),
            "norm_eps": fields.take("rms_norm_eps", float, 1e-6),
            "layer_kinds": tuple(layer_kinds),
            "tied_embeddings": fields.take("tie_word_embeddings", bool, False),
            **settings,
        }
    )
    fields.refuse_unread(HARMLESS_FIELDS)
    return config


def positive(fields: ConfigFields, name: str, default: float) -> float:
    """A number that something is divided by. Raises ModelConfigError: it is not above zero."""
    value: float = fields.take(name, float, default)
    if not value > 0:
        raise ModelConfigError(f"{fields.origin} has {name}={value:g}, expected a number above 0: fix the file")
    return value


def biases_of(fields: ConfigFields) -> dict[str, bool]:
    """The settings of families whose attention_bias is for all four matrices."""
    bias = fields.take("attention_bias", bool, False)
    return {"attention_bias": bias, "output_bias": bias}


def windows_of(fields: ConfigFields, window: int | None, is_windowed: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: by layer_types, or where that is absent by `is_windowed` of the layer's number."""
    num_layers = fields.take("num_hidden_layers", int)
    types = fields.take("layer_types", list, None)
    if types is None:
        types = [_SLIDING if window is not None and is_windowed(layer) else _FULL for layer in range(num_layers)]
    unknown = [each for each in types if each not in (_SLIDING, _FULL)]
    if unknown or (window is None and _SLIDING in types):
        raise UnsupportedModelError(
            f"{fields.origin} has layer_types with {(unknown or [_SLIDING])[0]!r}"
            + ("" if unknown else " and no window for it")
            + f", implemented are {_FULL} and, with sliding_window, {_SLIDING}: use a model of those"
        )
    if len(types) != num_layers:
        raise ModelConfigError(f"{fields.origin} has {len(types)} layer_types for {num_layers} layers: fix the file")
    return tuple(window if each == _SLIDING else None for each in types)


def rope_of(
    fields: ConfigFields, *, theta: float = 10000.0, partial: bool = False, layer_type: str | None = None
) -> RopeConfig:
    """rope_parameters (transformers 5), or rope_theta beside rope_scaling (before).

    `theta` is what a file means that states none. `partial`: the family may rotate a part of each head. `layer_type`:
    which entry of rope_parameters it is, where that has one for every type of layer.
    """
    outer_theta = fields.take("rope_theta", float, None)
    new, old = fields.take("rope_parameters", dict, None), fields.take("rope_scaling", dict, None)
    if new is not None and layer_type is not None:
        if not new.keys() <= {_SLIDING, _FULL} or not all(isinstance(each, dict | None) for each in new.values()):
            raise ModelConfigError(
                f"{fields.origin} has rope_parameters that are no objects {_FULL} and {_SLIDING}: fix the file"
            )
        new, outer_theta = new.get(layer_type) or {}, None
    layouts = {"rope_parameters": new, "rope_scaling": old}
    ropes = [ConfigFields(each or {}, f"{fields.origin}'s {name}") for name, each in layouts.items()]
    kinds = [_rope_kind(each) for each in ropes]
    if new is not None and old is not None and new != old:
        raise ModelConfigError(
            f"{fields.origin} has both rope_parameters={shortened(new)} and rope_scaling={shortened(old)}, which "
            "differ: keep one"
        )
    rope, kind = (ropes[0], kinds[0]) if new else (ropes[1], kinds[1])
    inner_theta = rope.take("rope_theta", float, None)
    if outer_theta is not None and inner_theta is not None and outer_theta != inner_theta:
        raise ModelConfigError(
            f"{fields.origin} has two values of rope_theta, {outer_theta:g} and {inner_theta:g}: keep one"
        )
    common: dict[str, Any] = {
        "theta": next((value for value in (inner_theta, outer_theta) if value is not None), theta)
    }
    fraction = _rotated_fraction(fields, rope, partial)
    if fraction != 1:
        common["rotary_dim"] = int(head_dim_of(fields) * fraction)
    rope.skip("finetuned")  # how the model was trained
    fields.skip("original_max_position_embeddings")  # of no use to the kinds that do not read it
    config = RopeConfig(**common, **_SCALINGS[kind](fields, rope))
    rope.refuse_unread(frozenset({"original_max_position_embeddings"} if kind in ("default", "dynamic") else ()))
    return config


def _rope_kind(rope: ConfigFields) -> str:
    stated = rope.take("type", str, None)
    kind: str = rope.take("rope_type", str, stated or "default")
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):
        kind = "longrope"  # which had other names at first
    if kind not in _SCALINGS:
        raise UnsupportedModelError(
            f"{rope.origin} has RoPE type {shortened(kind)}, implemented are {', '.join(_SCALINGS)}: use a model with "
            "one of those"
        )
    return kind


def _rotated_fraction(fields: ConfigFields, rope: ConfigFields, partial: bool) -> float:
    if not partial:
        fields.require("partial_rotary_factor", 1, 1.0)
        rope.require("partial_rotary_factor", 1, 1.0)
        return 1.0
    outer = fields.take("partial_rotary_factor", float, 1.0)
    return rope.take("partial_rotary_factor", float, outer)


def _unscaled(fields: ConfigFields, rope: ConfigFields) -> dict[str, Any]:
    return {}


def _dynamic(fields: ConfigFields, rope: ConfigFields) -> dict[str, Any]:
    return {"kind": "dynamic", "factor": rope.take("factor", float), "original_context": _positions(fields)}


def _linear(fields: ConfigFields, rope: ConfigFields) -> dict[str, Any]:
    return {"kind": "linear", "factor": rope.take("factor", float)}


def _llama3(fields: ConfigFields, rope: ConfigFields) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": rope.take("factor", float),
        "low_freq_factor": rope.take("low_freq_factor", float),
        "high_freq_factor": rope.take("high_freq_factor", float),
        "original_context": _original(fields, rope),
    }


def _yarn(fields: ConfigFields, rope: ConfigFields) -> dict[str, Any]:
    factor = rope.take("factor", float)
    scale, scale_all = rope.take("mscale", float, None), rope.take("mscale_all_dim", float, None)
    if scale and scale_all:
        attention_factor = yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, scale_all)
    else:
        attention_factor = yarn_attention_factor(factor)
    return {
        "kind": "yarn",
        "factor": factor,
        "original_context": _original(fields, rope),
        "attention_factor": rope.take("attention_factor", float, attention_factor),
        "beta_fast": rope.take("beta_fast", float, 32.0),
        "beta_slow": rope.take("beta_slow", float, 1.0),
        "truncate": rope.take("truncate", bool, True),
    }


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature, as a factor of queries and keys each."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(fields: ConfigFields, rope: ConfigFields) -> dict[str, Any]:
    original = _original(fields, rope)
    factor = rope.take("factor", float, None)
    if factor is None:
        factor = _positions(fields) / original if original > 0 else 0.0
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "kind": "longrope",
        "original_context": original,
        "frequency_divisors": _divisors(rope, "short_factor"),
        "long_divisors": _divisors(rope, "long_factor"),
        "attention_factor": rope.take("attention_factor", float, attention_factor),
    }


def _divisors(rope: ConfigFields, name: str) -> tuple[float, ...]:
    numbers = rope.take(name, list)
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in numbers):
        raise ModelConfigError(f"{rope.origin} has {name} that is no list of numbers: fix the file")
    return tuple(float(each) for each in numbers)


_SCALINGS: dict[str, Callable[[ConfigFields, ConfigFields], dict[str, Any]]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _positions(fields: ConfigFields) -> int:
    return fields.take("max_position_embeddings", int, 2048)


def _original(fields: ConfigFields, rope: ConfigFields) -> int:
    """The context of training, unscaled; what the file says beside its RoPE goes before what it says in it."""
    inner = rope.take("original_max_position_embeddings", int, _positions(fields))
    outer: int = fields.take("original_max_position_embeddings", int, inner)
    return outer
