"""Random weights of every kind, and the native provider under one instruction set and number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np

from kv_kernels.native import load_library
from kv_kernels.weights import BLOCK_SIZE, BlockQuantWeight, DenseWeight, Weight

DENSE_KINDS = ("float32", "bfloat16", "float16")
QUANT_KINDS = ("q8_0", "q4_0", "q4_1")
AVAILABLE_LEVELS = tuple(load_library().levels())


@contextmanager
def running(*, level: str | None = None, threads: int = 0) -> Iterator[None]:
    """Native calls that finish inside use this instruction set and so many threads."""
    library = load_library()
    before = library.level
    library.set_level(level or before)
    library.set_threads(threads)
    try:
        yield
    finally:
        library.set_level(before)
        library.set_threads(0)


def random_weight(seed: int, kind: str, *stack: int, out_features: int, in_features: int) -> Weight:
    """A weight [*stack, out, in]; a quantized one has in_features rounded up to whole blocks."""
    rng = np.random.default_rng(seed)
    if kind in DENSE_KINDS:
        return DenseWeight(jnp.asarray(rng.standard_normal((*stack, out_features, in_features), np.float32), kind))
    blocks = -(-in_features // BLOCK_SIZE)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, (*stack, out_features, blocks)), jnp.float16)
    if kind == "q8_0":
        quants = jnp.asarray(rng.integers(-128, 128, (*stack, out_features, blocks * 32), np.int8))
    else:
        quants = jnp.asarray(rng.integers(0, 256, (*stack, out_features, blocks * 16), np.uint8))
    mins = jnp.asarray(rng.standard_normal(scales.shape), jnp.float16) if kind == "q4_1" else None
    return BlockQuantWeight(quants, scales, mins, kind)
