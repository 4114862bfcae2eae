"""The metadata of a GGUF file read the way every family reads it, with the keys that llama.cpp's converters write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from models.assembly import Rows
from models.config import DecoderConfig, LayerKind, ModelConfigError, RopeConfig, UnsupportedModelError
from models.config_fields import ConfigFields
from models.families.hf_model import yarn_attention_factor

# Keys below the architecture's name that describe and do not compute.
_HARMLESS = frozenset(
    {
        "tensor_data_layout",
        "leading_dense_block_count",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
    }
)


_SCALES = {
    "attention.scale": "attention_scale",
    "logit_scale": "logit_divisor",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
}


class GgufModel:
    """A file's metadata below the name of its architecture, and what it has in tensors.

    `numbers(name)` are the values of a small tensor, None where there is none.
    """

    def __init__(
        self,
        fields: ConfigFields,
        architecture: str,
        tensor_names: Collection[str],
        numbers: Callable[[str], tuple[float, ...] | None],
    ) -> None:
        self.fields = fields
        self.architecture = architecture
        self.tensor_names = tensor_names
        self.numbers = numbers

    def take(self, key: str, kind: type, *default: Any) -> Any:
        """The value of `key`, see `ConfigFields.take`."""
        return self.fields.take(f"{self.architecture}.{key}", kind, *default)

    def require(self, key: str, *allowed: Any) -> None:
        """See `ConfigFields.require`."""
        self.fields.require(f"{self.architecture}.{key}", *allowed)

    def size(self, key: str, *default: int) -> int:
        """An integer that some converters write once per layer."""
        name = f"{self.architecture}.{key}"
        if isinstance(self.fields.peek(name), list):
            values = set(self.fields.take(name, list))
            if len(values) != 1:
                raise UnsupportedModelError(
                    f"{self.fields.origin} has {name} that differs between layers: use a model with one value"
                )
            return int(values.pop())
        return int(self.fields.take(name, int, *default))

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        num_heads = self.size("attention.head_count")
        if num_heads < 1:
            raise ModelConfigError(
                f"{self.architecture}.attention.head_count is {num_heads}; it must be at least 1: get the file again"
            )
        return self.size("attention.key_length", self.size("embedding_length") // num_heads)

    def rope(self) -> RopeConfig:
        """The rotation of all layers that have no other."""
        theta = self.take("rope.freq_base", float, 10000.0)
        rotary_dim = self.size("rope.dimension_count", self.head_dim)
        common: dict[str, Any] = {"theta": theta, "frequency_divisors": self.numbers("rope_freqs.weight")}
        if rotary_dim != self.head_dim:
            common["rotary_dim"] = rotary_dim
        linear_key = "rope.scale_linear"  # how older files say it
        stated = self.take(linear_key, float, None)
        kind = self.take("rope.scaling.type", str, "none" if stated is None else "linear")
        factor = self.take("rope.scaling.factor", float, 1.0 if stated is None else stated)
        original = self.take("rope.scaling.original_context_length", int, 0)
        short = self.numbers("rope_factors_short.weight")
        if short is not None and kind in ("none", "longrope"):
            attention_factor = self.take("rope.scaling.attn_factor", float, 1.0)
            common |= {"frequency_divisors": short, "attention_factor": attention_factor}
            common |= {"long_divisors": self.numbers("rope_factors_long.weight")}
            return RopeConfig(kind="longrope", original_context=original or self.size("context_length"), **common)
        self.require("rope.scaling.attn_factor", 1.0)
        if kind == "none":
            return RopeConfig(**common)
        if kind == "linear":
            return RopeConfig(kind="linear", factor=factor, **common)
        if kind == "yarn":
            self.require("rope.scaling.yarn_ext_factor", 1.0)
            self.require("rope.scaling.yarn_attn_factor", 1.0)
            self.require("rope.scaling.yarn_log_multiplier", 0.0)
            return RopeConfig(
                kind="yarn",
                factor=factor,
                original_context=original or self.size("context_length"),
                attention_factor=yarn_attention_factor(factor),
                beta_fast=self.take("rope.scaling.yarn_beta_fast", float, 32.0),
                beta_slow=self.take("rope.scaling.yarn_beta_slow", float, 1.0),
                **common,
            )
        raise UnsupportedModelError(
            f"{self.fields.origin} has {self.architecture}.rope.scaling.type={kind!r}, implemented are none, linear, "
            "yarn, and tensors of frequency factors: use a model with one of those"
        )

    def windows(self, window: int | None, is_windowed: Callable[[int], bool]) -> tuple[int | None, ...]:
        """The window of each layer: by the file's pattern of layers, or by `is_windowed` of the layer's number."""
        key = f"{self.architecture}.attention.sliding_window_pattern"
        num_layers = self.size("block_count")
        if isinstance(self.fields.peek(key), list):
            pattern = [bool(each) for each in self.fields.take(key, list)]
            if len(pattern) != num_layers:
                raise ModelConfigError(
                    f"{self.fields.origin} has {len(pattern)} entries of {key} for {num_layers} layers: get it again"
                )
        else:
            every = self.fields.take(key, int, 0)
            pattern = [(layer + 1) % every != 0 if every else is_windowed(layer) for layer in range(num_layers)]
        return tuple(window if each else None for each in pattern)

    def decoder_config(self, layer_kinds: Sequence[LayerKind], **settings: Any) -> DecoderConfig:
        """A DecoderConfig from the keys that every family has, and the family's own `settings`.

        Raises:
            ModelConfigError, UnsupportedModelError: a key is missing, contradicts another, or nobody read it.
        """
        num_heads = self.size("attention.head_count")
        self.require("attention.value_length", self.head_dim)
        self.require("attention.causal", True)
        if "experts" not in settings:
            self.require("expert_count", 0)
            self.require("expert_used_count", 0)
        for key, setting in _SCALES.items():
            if setting not in settings:
                self.require(key, 0.0)  # what converters write for "not scaled"
        config = DecoderConfig(
            **{
                "architecture": self.architecture,
                "vocab_size": self.size("vocab_size"),
                "hidden_size": self.size("embedding_length"),
                "intermediate_size": self.size("feed_forward_length"),
                "num_layers": self.size("block_count"),
                "num_heads": num_heads,
                "num_kv_heads": self.size("attention.head_count_kv", num_heads),
                "head_dim": self.head_dim,
                "max_context": self.size("context_length"),
                "norm_eps": self.take("attention.layer_norm_rms_epsilon", float),
                "layer_kinds": tuple(layer_kinds),
                "tied_embeddings": "output.weight" not in self.tensor_names,
                "attention_bias": "blk.0.attn_q.bias" in self.tensor_names,
                "output_bias": "blk.0.attn_output.bias" in self.tensor_names,
                "mlp_bias": "blk.0.ffn_up.bias" in self.tensor_names,
                **settings,
            }
        )
        self.fields.refuse_unread(frozenset(f"{self.architecture}.{key}" for key in _HARMLESS))
        return config


def interleaved_rows(config: DecoderConfig) -> Mapping[str, Rows]:
    """Architectures of llama.cpp's rope type NORM keep a rotated pair in neighboring rows (2i, 2i+1 of a head); we keep
    it head_dim/2 apart.
    """
    rows = {}
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        order = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        rows[f"layers.attention.{name}.weight"] = rows[f"layers.attention.{name}.bias"] = Rows(order, len(order))
    return rows
