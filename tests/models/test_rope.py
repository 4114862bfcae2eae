"""Rotary frequencies and the rotation itself, against their definitions."""

import jax.numpy as jnp
import numpy as np

from kv_kernels.composition import rotate
from models.config import RopeConfig
from models.rope import inverse_frequencies, rotation


def test_default_frequencies_fall_from_one_by_powers_of_theta() -> None:
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta=100.0), 4), [1.0, 0.1], rtol=1e-7)


def test_linear_scaling_divides_every_frequency() -> None:
    plain, scaled = (
        inverse_frequencies(RopeConfig(), 16),
        inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 16),
    )
    np.testing.assert_allclose(scaled * 4, plain, rtol=1e-6)


def test_llama3_keeps_short_wavelengths_and_slows_long_ones() -> None:
    rope = RopeConfig(500000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain, scaled = inverse_frequencies(RopeConfig(500000.0), 128), inverse_frequencies(rope, 128)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_divisors_divide_their_frequencies() -> None:
    scaled = inverse_frequencies(RopeConfig(frequency_divisors=(1.0, 8.0)), 4)
    np.testing.assert_allclose(scaled, inverse_frequencies(RopeConfig(), 4) / [1, 8], rtol=1e-6)


def test_each_pair_half_a_head_apart_turns_by_position_times_frequency() -> None:
    frequencies = np.array([1.0, 0.5], np.float32)
    x = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), rotation(jnp.array([0, 7, 1000]), frequencies)))
    angles = np.array([0, 7, 1000])[:, None, None] * frequencies
    expected = (x[..., :2] + 1j * x[..., 2:]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :2] + 1j * turned[..., 2:], expected, atol=2e-4)
    np.testing.assert_array_equal(turned[0], x[0])


def test_a_half_precision_input_is_rotated_in_float32_and_rounded_once() -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 1, 4)), jnp.bfloat16)
    by = rotation(jnp.array([321]), np.array([1.0, 0.3], np.float32))
    assert rotate(x, by).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotate(x, by), rotate(x.astype(jnp.float32), by).astype(jnp.bfloat16))
