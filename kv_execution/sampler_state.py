"""What the device remembers of every request between steps: its tokens, and its logit bias.

Sampling leaves each token here, and the next step reads it from here, so that no token has to pass through the host
on its way from one step to the next.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kv_execution.sampling_params import MAX_LOGIT_BIAS
from kv_kernels.scatter import write_rows

Column: TypeAlias = jax.Array | np.ndarray[Any, np.dtype[Any]]
"""One number (or more) of every row: numpy on the host, a jax array in the step."""


class SamplerState(NamedTuple):
    """What the device remembers of every request between steps; the step donates and returns it."""

    history: Column  # i32 [max_requests, max_context]: token ids by position
    bias_ids: Column  # i32 [max_requests, MAX_LOGIT_BIAS]
    bias_values: Column  # f32 [max_requests, MAX_LOGIT_BIAS]


def empty_sampler_state(
    max_requests: int, max_context: int, sharding: jax.sharding.Sharding | None = None
) -> SamplerState:
    """A state with room for `max_requests` sequences of `max_context` tokens, on the default device or a sharding's."""

    def zeros() -> SamplerState:
        return SamplerState(
            history=jnp.zeros((max_requests, max_context), jnp.int32),
            bias_ids=jnp.zeros((max_requests, MAX_LOGIT_BIAS), jnp.int32),
            bias_values=jnp.zeros((max_requests, MAX_LOGIT_BIAS), jnp.float32),
        )

    # One program: as single operations these would be six to compile.
    return jax.jit(zeros, out_shardings=sharding)()


def set_request(
    state: SamplerState, row: int, token_ids: np.ndarray[Any, np.dtype[Any]], bias: Sequence[tuple[int, float]]
) -> SamplerState:
    """Give `row` to a request of `token_ids` [tokens], with a `bias` of at most MAX_LOGIT_BIAS (token id, bias).

    A row outside the state changes nothing. Donates `state`; compiles once.
    """
    history = np.zeros((1, state.history.shape[1]), np.int32)
    history[0, : len(token_ids)] = token_ids
    bias_ids = np.zeros((1, MAX_LOGIT_BIAS), np.int32)
    bias_ids[0, : len(bias)] = [token for token, _ in bias]
    bias_values = np.zeros((1, MAX_LOGIT_BIAS), np.float32)
    bias_values[0, : len(bias)] = [value for _, value in bias]
    return _set_rows(state, np.array([row], np.int32), SamplerState(history, bias_ids, bias_values))


@partial(jax.jit, donate_argnums=0)
def _set_rows(state: SamplerState, rows: jax.Array, values: SamplerState) -> SamplerState:
    return SamplerState(
        *(write_rows(jnp.asarray(old), rows, jnp.asarray(new)) for old, new in zip(state, values, strict=True))
    )


def record_tokens(state: SamplerState, history_row: Column, position: Column, token: Column) -> SamplerState:
    """Write tokens [n] at (history_row [n], position [n]); a pair outside the history, padding say, writes nothing."""
    max_requests, max_context = state.history.shape
    inside = (history_row >= 0) & (history_row < max_requests) & (position >= 0) & (position < max_context)
    flat = jnp.where(inside, history_row * max_context + position, -1)
    history = write_rows(jnp.asarray(state.history).reshape(-1), flat, jnp.asarray(token)).reshape(
        max_requests, max_context
    )
    return state._replace(history=history)
