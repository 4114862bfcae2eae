"""The context that a model is loaded for, and the one set of frequencies that follows from it.

Longrope and dynamic NTK give long sequences other frequencies than short ones. Keys in a cache have been turned once,
so the choice cannot wait for a sequence to grow: it is made here, for the model, and holds for every position.
"""

from __future__ import annotations

import dataclasses
import logging

from kv_common.errors import JaxkvError
from models.config import DecoderConfig, RopeConfig

logger = logging.getLogger(__name__)


class ContextError(JaxkvError):
    """A model that is to be loaded for a context it does not have."""


def fit_context(config: DecoderConfig, max_context: int | None, origin: str) -> DecoderConfig:
    """`config`, as its file states it, for sequences of at most `max_context` tokens; None: as many as it takes with
    the frequencies of short ones. Raises ContextError.
    """
    own, most = _limits(config)
    if max_context is None:
        max_context = own
        if own < most:
            logger.warning(
                "%s: the context is %d tokens; max_context (--max-context) makes it up to %d, with the frequencies of "
                "long sequences",
                *(origin, own, most),
            )
    elif not 2 <= max_context <= most:
        raise ContextError(
            f"{origin}: max_context is {max_context}, the model takes 2 to {most} tokens: choose of those"
        )
    kinds = tuple(
        kind if kind.rope is None else dataclasses.replace(kind, rope=_for_context(kind.rope, max_context, config))
        for kind in config.layer_kinds
    )
    return dataclasses.replace(config, max_context=max_context, layer_kinds=kinds)


def _limits(config: DecoderConfig) -> tuple[int, int]:
    """The context with the frequencies of short sequences, and with those of long ones."""
    own = most = config.max_context
    for rope in (kind.rope for kind in config.layer_kinds if kind.rope is not None):
        stretched = int(rope.original_context * rope.factor)
        if rope.kind == "yarn":
            # A stated number may be that of the model before it was stretched.
            own, most = max(own, stretched), max(most, stretched)
        elif rope.kind == "dynamic":
            own, most = min(own, rope.original_context), max(most, stretched)
        elif rope.kind == "longrope":
            own = min(own, rope.original_context)
            most = own if rope.long_divisors is None else most
    return own, most


def _for_context(rope: RopeConfig, max_context: int, config: DecoderConfig) -> RopeConfig:
    if rope.kind == "longrope":
        divisors = rope.long_divisors if max_context > rope.original_context else rope.frequency_divisors
        return dataclasses.replace(rope, frequency_divisors=divisors, long_divisors=None)
    if rope.kind != "dynamic":
        return rope
    stretch = max(1.0, rope.factor * max_context / rope.original_context - (rope.factor - 1))
    rotary_dim = config.head_dim if rope.rotary_dim is None else rope.rotary_dim
    # A single pair turns by one radian whatever the base.
    theta = rope.theta * stretch ** (rotary_dim / (rotary_dim - 2)) if rotary_dim > 2 else rope.theta
    return dataclasses.replace(rope, kind="default", theta=theta, factor=1.0, original_context=0)
