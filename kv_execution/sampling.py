"""Choosing the next token of every row on the device, jittable and with no host callback.

Contract: a row's token depends on its own logits, parameters, history, seed and position, bit for bit, whatever the
other rows or their number. So nothing that decides a token is a sum of floats, whose order XLA picks by shape: cuts
are found by comparing, counting, and adding fixed-point probabilities as integers. Tokens that tie at a cut are all
kept. Each optional part sits behind a `lax.cond` on whether any row asks for it, so one compiled step serves every
mixture, and a row that did not ask keeps its logits unchanged. Cuts take 32 steps of bisection over the ordered
integer image of float32, never a sort. Log-probabilities are natural and of the raw model distribution.
Logits that are NaN count as -inf; a row of nothing else yields token -1.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kv_execution.sampler_state import Column, SamplerState
from kv_execution.sampling_params import GREEDY_BELOW_TEMPERATURE, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS
from kv_kernels.argmax import argmax, below_infinity, ordered_keys

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class GreedyInputs(NamedTuple):
    """Where the tokens of a step go, each [rows] i32, as in `SamplingInputs`."""

    position: Column
    history_row: Column


class SamplingInputs(NamedTuple):
    """One step's sampling parameters, each [rows], meaning what they mean in `SamplingParams`.

    A padding row has temperature and position 0 and asks for nothing; its token means nothing.

    `seed` [rows, 2] u32 holds the words of `seed_words`; `bias_count` counts valid entries of the row's bias arrays;
    `position` is the index of the token being sampled, which is the number of tokens known so far; the first
    `prompt_len` of them were not generated; `history_row` is the request's row in `SamplerState`.
    """

    temperature: Column  # f32
    top_k: Column  # i32
    top_p: Column  # f32
    min_p: Column  # f32
    repetition_penalty: Column  # f32
    presence_penalty: Column  # f32
    frequency_penalty: Column  # f32
    seed: Column  # u32 [rows, 2]
    bias_count: Column  # i32
    prompt_len: Column  # i32
    position: Column  # i32
    history_row: Column  # i32
    logprobs: Column  # bool
    top_logprobs: Column  # i32


class ConstrainedInputs(NamedTuple):
    """A step of which some rows may take certain tokens only; the rest, and padding, may take all.

    `allowed` [rows, ceil(vocab / 32)] u32: token t is bit t % 32 of word t // 32.
    """

    sampling: SamplingInputs
    allowed: Column


StepSampling = GreedyInputs | SamplingInputs | ConstrainedInputs
"""What a step asks of the sampler, of which each kind has a program of its own."""


class Sampled(NamedTuple):
    """One token per row. Log-probabilities mean something in rows that ask for them, entries past a row's
    `top_logprobs` are id -1 and log-probability -inf.
    """

    token: Column  # i32 [rows]
    logprob: Column  # f32 [rows]
    top_ids: Column  # i32 [rows, MAX_TOP_LOGPROBS], most likely first, ties by lower id
    top_logprobs: Column  # f32 [rows, MAX_TOP_LOGPROBS]


def allowed_logits(logits: jax.Array, allowed: Column) -> jax.Array:
    """`logits` [rows, vocab] f32 where the bits of `allowed`, see `ConstrainedInputs`, are set; -inf elsewhere."""
    bits = jnp.arange(32, dtype=jnp.uint32)
    unpacked = ((jnp.asarray(allowed)[:, :, None] >> bits) & 1).reshape(logits.shape[0], -1)
    return jnp.where(unpacked[:, : logits.shape[1]] > 0, logits, -jnp.inf)


def sample(
    logits: jax.Array, inputs: SamplingInputs, state: SamplerState, eligible: jax.Array | None = None
) -> Sampled:
    """Choose the next token of every row, given the model's own logits [rows, vocab] f32, from those that are
    `eligible`, or all; log-probabilities are those of all either way.

    A random row takes the argmax of processed logits plus Gumbel noise, whose key is fold_in(key(seed), position).
    """
    processed = process_logits(logits if eligible is None else eligible, inputs, state)
    random = _is_random(inputs)
    token = lax.cond(
        jnp.any(random),
        lambda: argmax(jnp.where(random[:, None], processed + _gumbel(inputs, logits.shape[1]), processed)),
        lambda: argmax(processed),
    )
    log_normalizer = lax.cond(
        jnp.any(inputs.logprobs),
        lambda: jax.nn.logsumexp(logits, axis=1, keepdims=True),
        lambda: jnp.zeros((logits.shape[0], 1), logits.dtype),
    )
    logprob = jnp.take_along_axis(logits, token[:, None], axis=1) - log_normalizer
    top = _top_tokens(logits, log_normalizer, inputs.top_logprobs)
    return Sampled(token, logprob[:, 0], top.ids, top.logprobs)


def process_logits(logits: jax.Array, inputs: SamplingInputs, state: SamplerState) -> jax.Array:
    """The logits [rows, vocab] f32 to draw from: -inf where a token is ruled out, softmax of the rest.

    Order: repetition penalty, presence and frequency penalties, logit bias, then for rows that are not greedy
    temperature, top-k, top-p, min-p. Nothing is NaN, and the most likely token always stays.
    """
    vocab_size = logits.shape[1]
    random = _is_random(inputs)
    repetition = inputs.repetition_penalty[:, None]
    presence, frequency = inputs.presence_penalty[:, None], inputs.frequency_penalty[:, None]

    def penalize_repetition(logits: jax.Array) -> jax.Array:
        seen = _occurrences(state, inputs, jnp.zeros_like(inputs.position), vocab_size) > 0
        penalized = jnp.where(logits > 0, logits / repetition, logits * repetition)
        return jnp.where(seen, below_infinity(penalized), logits)

    def penalize_generated(logits: jax.Array) -> jax.Array:
        count = _occurrences(state, inputs, inputs.prompt_len, vocab_size)
        return jnp.where(count > 0, logits - count * frequency - presence, logits)

    def temper_and_filter(logits: jax.Array) -> jax.Array:
        tempered = below_infinity(logits / jnp.where(random, inputs.temperature, 1)[:, None])
        for filter_logits, parameter, asked in (
            (_top_k_filter, inputs.top_k, inputs.top_k > 0),
            (_top_p_filter, inputs.top_p, inputs.top_p < 1),
            (_min_p_filter, inputs.min_p, inputs.min_p > 0),
        ):
            tempered = _where_asked(
                asked & random, partial(filter_logits, parameter=parameter, asked=asked & random), tempered
            )
        return tempered

    logits = below_infinity(logits)
    logits = _where_asked(inputs.repetition_penalty != 1, penalize_repetition, logits)
    logits = _where_asked((inputs.presence_penalty != 0) | (inputs.frequency_penalty != 0), penalize_generated, logits)
    logits = _where_asked(inputs.bias_count > 0, partial(_add_bias, inputs=inputs, state=state), logits)
    return _where_asked(random, temper_and_filter, logits)


def _is_random(inputs: SamplingInputs) -> jax.Array:
    return jnp.greater_equal(inputs.temperature, GREEDY_BELOW_TEMPERATURE)


def _where_asked(asked: Column, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """`change` must leave rows that did not ask as they are: it runs for all rows as soon as one asks."""
    return lax.cond(jnp.any(asked), change, lambda logits: logits, logits)


def _occurrences(state: SamplerState, inputs: SamplingInputs, start: Column, vocab_size: int) -> jax.Array:
    """How often each token occurs at positions start <= i < position: [rows, vocab] i32."""
    history = state.history[inputs.history_row]
    index = jnp.arange(history.shape[1], dtype=jnp.int32)
    counted = (index >= start[:, None]) & (index < inputs.position[:, None])
    # An id past the vocabulary is dropped, which is also how positions that do not count are left out.
    token = jnp.where(counted, history, vocab_size)
    rows = jnp.arange(token.shape[0], dtype=jnp.int32)[:, None]
    zeros = jnp.zeros((token.shape[0], vocab_size), jnp.int32)
    return zeros.at[rows, token].add(1, mode="drop", wrap_negative_indices=False)


def _add_bias(logits: jax.Array, inputs: SamplingInputs, state: SamplerState) -> jax.Array:
    valid = jnp.arange(MAX_LOGIT_BIAS, dtype=jnp.int32) < inputs.bias_count[:, None]
    token = jnp.where(valid, state.bias_ids[inputs.history_row], logits.shape[1])
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    bias = state.bias_values[inputs.history_row]
    return logits.at[rows, token].add(bias, mode="drop", wrap_negative_indices=False)


def _top_k_filter(logits: jax.Array, parameter: Column, asked: Column) -> jax.Array:
    keys = ordered_keys(logits)

    def enough(cut: jax.Array) -> jax.Array:
        return jnp.sum(keys >= cut[:, None], axis=1, dtype=jnp.int32) >= parameter

    return _keep(asked, keys >= _highest_cut(enough, logits.shape[0])[:, None], logits)


def _top_p_filter(logits: jax.Array, parameter: Column, asked: Column) -> jax.Array:
    keys = ordered_keys(logits)
    # Fixed-point probabilities relative to the most likely token, in two words narrow enough that their sums over
    # the vocabulary fit 32 bits. Up to 65,536 tokens the unit is 2**-32, and the kept mass exact to 2**-17 at worst.
    word_bits = min(16, 32 - (logits.shape[1] - 1).bit_length())
    scale = np.nextafter(np.float32(2 ** (2 * word_bits)), np.float32(0))
    weights = (_relative_probabilities(logits) * scale).astype(jnp.uint32)
    high_words, low_words = weights >> word_bits, weights & np.uint32(2**word_bits - 1)

    def mass(cut: jax.Array) -> jax.Array:
        # One reduction of both words: two would read the keys twice and take twice as long.
        kept, zero = keys >= cut[:, None], jnp.uint32(0)
        high, low = lax.reduce(
            (jnp.where(kept, high_words, 0), jnp.where(kept, low_words, 0)),
            (zero, zero),
            lambda left, right: (left[0] + right[0], left[1] + right[1]),
            (1,),
        )
        high, low = high + (low >> word_bits), low & np.uint32(2**word_bits - 1)
        return high.astype(jnp.float32) * np.float32(2**word_bits) + low.astype(jnp.float32)

    wanted = parameter * mass(jnp.zeros(logits.shape[0], jnp.uint32))
    cut = _highest_cut(lambda cut: mass(cut) >= wanted, logits.shape[0])
    # top_p = 0 is reached by no token at all; the most likely one stays regardless.
    return _keep(asked, keys >= jnp.minimum(cut, jnp.max(keys, axis=1))[:, None], logits)


def _min_p_filter(logits: jax.Array, parameter: Column, asked: Column) -> jax.Array:
    return _keep(asked, _relative_probabilities(logits) >= parameter[:, None], logits)


def _keep(asked: Column, kept: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.where(kept | ~asked[:, None], logits, -jnp.inf)


def _relative_probabilities(logits: jax.Array) -> jax.Array:
    """Probabilities divided by the row's largest, [rows, vocab] in [0, 1]; 0 all over a row that is all -inf."""
    largest = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), -_FLOAT32_MAX)
    return jnp.exp(logits - largest)


def _highest_cut(enough: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The highest cut [rows] u32 for which `enough(cut)` [rows] holds, bit by bit; 0 where it never does.

    `enough` must be true below some cut of each row and false above it.
    """

    def try_bit(step: jax.Array, cut: jax.Array) -> jax.Array:
        higher = cut | (np.uint32(0x80000000) >> step.astype(jnp.uint32))
        return jnp.where(enough(higher), higher, cut)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(rows, jnp.uint32))


def _gumbel(inputs: SamplingInputs, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise [rows, vocab]; a row's depends on its seed and position only."""

    def row_bits(seed: jax.Array, position: jax.Array) -> jax.Array:
        # The generator is named: a change of jax's default must not change what a seed yields.
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), (vocab_size,), jnp.uint32)

    bits = jax.vmap(row_bits)(jnp.asarray(inputs.seed), jnp.asarray(inputs.position))
    # Not jax.random.gumbel, whose 23 bits end at 16: a token less likely than e**-16 could not win. Here the large
    # values come from uniforms near 0, where floats are dense, and end at 22.9.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * np.float32(2**-32), np.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-uniform))


class _TopTokens(NamedTuple):
    ids: jax.Array
    logprobs: jax.Array


def _top_tokens(logits: jax.Array, log_normalizer: jax.Array, asked_number: Column) -> _TopTokens:
    shape = (logits.shape[0], MAX_TOP_LOGPROBS)
    nothing = _TopTokens(jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))
    available = min(MAX_TOP_LOGPROBS, logits.shape[1])

    def best() -> _TopTokens:
        values, ids = lax.top_k(logits, available)
        wanted = jnp.arange(available) < asked_number[:, None]
        return _TopTokens(
            nothing.ids.at[:, :available].set(jnp.where(wanted, ids, -1)),
            nothing.logprobs.at[:, :available].set(jnp.where(wanted, values - log_normalizer, -jnp.inf)),
        )

    return lax.cond(jnp.any(asked_number > 0), best, lambda: nothing)
