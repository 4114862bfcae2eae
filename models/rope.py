"""Rotary position embedding in float32, half-split: element i of a head's rotated part is paired with element i + half.

Inverse frequencies are constants of the configuration, computed in float64 and rounded once; angles are computed per
step from the tokens' positions, once for all layers that share them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.provider import Rotation
from models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair, [rotary_dim/2] f32, of a rotation that is settled (see `models.context`)."""
    assert rope.kind != "dynamic", rope
    assert rope.long_divisors is None, rope
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    frequencies = rope.theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, rope, rotary_dim)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / np.asarray(rope.frequency_divisors, np.float64)
    return frequencies.astype(np.float32)


def rotation(positions: jax.Array, frequencies: np.ndarray, attention_factor: float = 1.0) -> Rotation:
    """The rotation of each token, from positions [tokens] int32 and frequencies [rotary_dim/2]."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    factor = np.float32(attention_factor)
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated in context / wavelength."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(frequencies: np.ndarray, rope: RopeConfig, rotary_dim: int) -> np.ndarray:
    """YaRN (Peng et al., 2023): pairs that turn more than beta_fast times in the original context are kept, those that
    turn less than beta_slow times slowed by `factor`, those between interpolated by their index.
    """

    def pair_of(turns: float) -> float:
        """The index, in elements of a head, at which a pair turns `turns` times in the original context."""
        return rotary_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001
    slowed = np.clip((np.arange(len(frequencies)) - first) / width, 0.0, 1.0)
    return (1 - slowed) * frequencies + slowed * frequencies / rope.factor
