"""Rotary position embedding in float32, half-split: element i of a head is paired with element i + head_dim/2.

Inverse frequencies are constants of the configuration, computed in float64 and rounded once; angles are computed per
step from the tokens' positions, once for all layers.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.provider import Rotation
from models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair, [head_dim/2] f32."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / np.asarray(rope.frequency_divisors, np.float64)
    return frequencies.astype(np.float32)


def rotation(positions: jax.Array, frequencies: np.ndarray) -> Rotation:
    """The rotation of each token, from positions [tokens] int32 and frequencies [head_dim/2]."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated in context / wavelength."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
