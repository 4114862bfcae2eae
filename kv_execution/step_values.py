"""What the programs of a step take and return: pytrees of arrays, with the shapes that a step is padded to."""

from typing import Any, NamedTuple

import jax

from kv_execution.sampler_state import SamplerState
from kv_execution.sampling import Sampled
from kv_kernels.provider import PoolPair

MAX_BURST_STEPS = 8
"""The host works about as long for a burst as for a step, which so many share."""


class DeviceState(NamedTuple):
    """What lives on the device between steps; every step donates it."""

    pools: PoolPair
    sampler: SamplerState


class ForwardInputs(NamedTuple):
    """One step's arrays, padded to its shape; int32.

    token_rows, positions, slots: [tokens], where each token is in the histories and where its K/V goes. scrub_pages
    [entries] and copy_targets [rows], -1 for none; copy_sources [rows]. logit_rows [rows]: the last token of each
    row. plan: the provider's. adapter_slots [tokens], None where the engine has no adapters.
    """

    token_rows: Any
    positions: Any
    slots: Any
    scrub_pages: Any
    copy_sources: Any
    copy_targets: Any
    logit_rows: Any
    plan: Any
    adapter_slots: Any


class BurstInputs(NamedTuple):
    """Some steps of one token a row, made one after the other. first: the first, whose plan has the pages of all; slots
    [MAX_BURST_STEPS, tokens] i32 of each; steps [] i32, how many there are.
    """

    first: ForwardInputs
    slots: Any
    steps: Any


class ForwardResult(NamedTuple):
    """The state after the step, and of every row what the output product takes, [rows, hidden]."""

    state: DeviceState
    hidden: jax.Array


class ScoreResult(NamedTuple):
    """The state after the step, and log-probabilities [tokens, vocab] f32."""

    state: DeviceState
    logprobs: jax.Array


class NetworkResult(NamedTuple):
    """What a network makes of a step: the pools with its K/V, and the hidden states or logits that it is asked for."""

    pools: PoolPair
    out: jax.Array


class PoolResult(NamedTuple):
    """The state after the step, and the sums with the weighted hidden states of its tokens, each in its row."""

    state: DeviceState
    sums: jax.Array


class SampleResult(NamedTuple):
    """The state with the sampled tokens in the histories, and those tokens."""

    state: SamplerState
    sampled: Sampled

    @property
    def token(self) -> Any:
        """The tokens [rows] i32."""
        return self.sampled.token


class GreedyResult(NamedTuple):
    """The state with the sampled tokens in the histories, and those tokens [rows] i32."""

    state: SamplerState
    token: jax.Array


class BurstResult(NamedTuple):
    """The state after the last step, with the tokens in the histories, and those tokens [MAX_BURST_STEPS, rows] i32."""

    state: DeviceState
    token: jax.Array
