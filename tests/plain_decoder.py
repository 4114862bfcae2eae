"""Every family as one plain forward pass in numpy's float64: no cache, no pages, no stacks, one sequence, no loops
saved. Written from config.json as its authors mean it, and the models' papers, to compare the engine's networks with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]
Tensors = Mapping[str, np.ndarray]


def plain_hidden(config: Config, tensors: Tensors, ids: np.ndarray) -> np.ndarray:
    """Final hidden states [tokens, hidden] of a model in Hugging Face's layout, its tensors by name."""
    model = _Model(config, tensors)
    x = model.weight("model.embed_tokens.weight")[ids] * model.embedding_scale
    for layer in range(config["num_hidden_layers"]):
        x = model.layer(x, layer)
    return model.norm(x, "model.norm")


def plain_logits(config: Config, tensors: Tensors, ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab]."""
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    hidden = plain_hidden(config, tensors, ids)
    logits = hidden @ tensors[head].astype(np.float64).T / config.get("logits_scaling", 1.0)
    cap = config.get("final_logit_softcapping")
    return logits if cap is None else cap * np.tanh(logits / cap)


class _Model:
    def __init__(self, config: Config, tensors: Tensors) -> None:
        self.config = config
        self.tensors = tensors
        self.kind = config["model_type"]
        self.is_gemma = self.kind.startswith("gemma")
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.embedding_scale = config["hidden_size"] ** 0.5 if self.is_gemma else config.get("embedding_multiplier", 1)

    def weight(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float64)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.weight(f"{name}.weight") + (1 if self.is_gemma else 0)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def layer(self, x: np.ndarray, layer: int) -> np.ndarray:
        at, scale = f"model.layers.{layer}.", self.config.get("residual_multiplier", 1.0)
        if self.kind == "olmo2":
            x = x + self.norm(self.attention(x, at, layer), at + "post_attention_layernorm")
            return x + self.norm(self.mlp(x, at), at + "post_feedforward_layernorm")
        attended = self.attention(self.norm(x, at + "input_layernorm"), at, layer)
        if self.is_gemma:
            x = x + self.norm(attended, at + "post_attention_layernorm")
            wide = self.mlp(self.norm(x, at + "pre_feedforward_layernorm"), at)
            return x + self.norm(wide, at + "post_feedforward_layernorm")
        x = x + scale * attended
        return x + scale * self.mlp(self.norm(x, at + "post_attention_layernorm"), at)

    def attention(self, x: np.ndarray, at: str, layer: int) -> np.ndarray:
        at, tokens = at + "self_attn.", len(x)
        if self.kind == "phi3":
            sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim]
            q, k, v = np.split(self.linear(x, at + "qkv_proj"), np.cumsum([sizes[0], sizes[1]]), axis=-1)
        else:
            q, k, v = (self.linear(x, f"{at}{name}_proj") for name in "qkv")
        if self.kind == "olmo2":
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k, v = (part.reshape(tokens, -1, self.head_dim) for part in (q, k, v))
        if self.kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        if self._rotates(layer):
            q, k = (_rotate(part, *self._frequencies(layer, tokens)) for part in (q, k))
        k, v = (np.repeat(part, self.heads // self.kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * self._scale()
        cap = self.config.get("attn_logit_softcapping")
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        distance = np.arange(tokens)[:, None] - np.arange(tokens)
        window = self._window(layer)
        hidden = (distance < 0) | (distance >= (tokens if window is None else window))
        scores = np.exp(np.where(hidden, -np.inf, scores - np.where(hidden, -np.inf, scores).max(-1, keepdims=True)))
        weights = scores / scores.sum(-1, keepdims=True)
        return self.linear(np.einsum("hqk,khd->qhd", weights, v).reshape(tokens, -1), at + "o_proj")

    def _scale(self) -> float:
        if self.is_gemma:
            return self.config["query_pre_attn_scalar"] ** -0.5
        return self.config.get("attention_multiplier", self.head_dim**-0.5)

    def _rotates(self, layer: int) -> bool:
        return self.kind != "smollm3" or bool(self.config["no_rope_layers"][layer])

    def _window(self, layer: int) -> int | None:
        window = self.config.get("sliding_window")
        if self.kind in ("mistral", "mixtral", "phi3"):
            return window
        types = self.config.get("layer_types")
        if types is not None:
            return window if types[layer] == "sliding_attention" else None
        if self.kind == "gemma2":
            return window if layer % 2 == 0 else None
        if self.kind == "gemma3_text":
            return window if (layer + 1) % self.config["sliding_window_pattern"] else None
        if self.config.get("use_sliding_window") and self.kind == "qwen3_moe":
            return window
        if self.config.get("use_sliding_window") and self.kind != "smollm3":
            return window if layer >= self.config["max_window_layers"] else None
        return None

    def _frequencies(self, layer: int, tokens: int) -> tuple[np.ndarray, float]:
        """Radians per position of each pair in a sequence of so many tokens, and what turned vectors are multiplied
        with.
        """
        config = self.config
        if "rope_parameters" in config:
            rope = config["rope_parameters"]
            if self.kind == "gemma3_text":
                rope = rope["full_attention" if self._window(layer) is None else "sliding_attention"]
            theta, fraction = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
        else:
            rope, theta = config.get("rope_scaling") or {}, config["rope_theta"]
            fraction = config.get("partial_rotary_factor", 1.0)
            if self.kind == "gemma3_text" and self._window(layer) is not None:
                rope, theta = {}, config["rope_local_base_freq"]
        size = int(self.head_dim * fraction)
        plain = 1.0 / theta ** (np.arange(0, size, 2) / size)
        return _scaled(rope, plain, theta, size, config, tokens)

    def mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        if self.kind == "mixtral":
            return self._mixture(x, at + "block_sparse_moe.", ("w1", "w3", "w2"), True)
        if self.kind == "qwen3_moe":
            names = ("gate_proj", "up_proj", "down_proj")
            return self._mixture(x, at + "mlp.", names, self.config["norm_topk_prob"])
        if self.kind == "arcee":
            return self.linear(np.maximum(self.linear(x, at + "mlp.up_proj"), 0) ** 2, at + "mlp.down_proj")
        if self.kind == "phi3":
            gate, up = np.split(self.linear(x, at + "mlp.gate_up_proj"), 2, axis=-1)
        else:
            gate, up = self.linear(x, at + "mlp.gate_proj"), self.linear(x, at + "mlp.up_proj")
        return self.linear((_gelu_tanh if self.is_gemma else _silu)(gate) * up, at + "mlp.down_proj")

    def _mixture(self, x: np.ndarray, at: str, names: tuple[str, str, str], renormalize: bool) -> np.ndarray:
        logits = self.linear(x, at + "gate")
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for token, row in enumerate(x):
            chosen = np.argsort(-probabilities[token])[: self.config["num_experts_per_tok"]]
            weights = probabilities[token, chosen]
            for expert, weight in zip(chosen, weights / weights.sum() if renormalize else weights, strict=True):
                gate, up, down = (f"{at}experts.{expert}.{name}" for name in names)
                out[token] += weight * self.linear(_silu(self.linear(row, gate)) * self.linear(row, up), down)
        return out


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _rotate(x: np.ndarray, frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Each pair (i, i + half) of the rotated part as one complex number, turned by its angle."""
    half = len(frequencies)
    turn = factor * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def _scaled(
    rope: Mapping[str, Any], plain: np.ndarray, theta: float, size: int, config: Config, tokens: int
) -> tuple[np.ndarray, float]:
    kind, positions = rope.get("rope_type", rope.get("type", "default")), config["max_position_embeddings"]
    if kind == "default" or (kind == "dynamic" and tokens <= positions):
        return plain, 1.0
    if kind == "dynamic":
        base = theta * (rope["factor"] * tokens / positions - rope["factor"] + 1) ** (size / (size - 2))
        return 1.0 / base ** (np.arange(0, size, 2) / size), 1.0
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", positions))
    if kind in ("longrope", "su"):
        stretch = rope.get("factor", positions / original)
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        divisors = rope["long_factor" if tokens > original else "short_factor"]
        return plain / np.array(divisors), rope.get("attention_factor", factor)
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (original / wavelength - low) / (high - low)
        between = (1 - smooth) * plain / factor + smooth * plain
        scaled = np.where(wavelength > original / low, plain / factor, between)
        return np.where(wavelength < original / high, plain, scaled), 1.0
    assert kind == "yarn"
    first, last = (
        size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    )
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = np.clip((np.arange(size // 2) - first) / (last - first or 0.001), 0, 1)
    temperature = [
        0.1 * scale * math.log(factor) + 1 for scale in (rope.get("mscale"), rope.get("mscale_all_dim")) if scale
    ]
    by_factor = temperature[0] / temperature[1] if len(temperature) == 2 else 0.1 * math.log(factor) + 1
    return plain / factor * ramp + plain * (1 - ramp), rope.get("attention_factor", by_factor)
