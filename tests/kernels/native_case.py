"""Random weights of every kind, and the native provider under one instruction set and number of threads."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np

from kv_kernels.native import load_library
from kv_kernels.weights import BLOCK_SIZE, FORMS, BlockQuantWeight, DenseWeight, Weight

DENSE_KINDS = ("float32", "bfloat16", "float16")
QUANT_KINDS = ("q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", "f8_e4m3", "q8_0/groups", "q4_1/groups")
"""With `/groups`: float32 scales and mins of groups of more than one block, as checkpoints other than GGUF have."""

FEW_QUANT_KINDS = ("q8_0", "q4_1", "q6_k", "q4_1/groups")
"""For what is around a product: one of each way to unpack."""

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
    kind, _, grouped = kind.partition("/")
    form, blocks, rows = FORMS[kind], -(-in_features // BLOCK_SIZE), (*stack, out_features)
    groups = blocks
    if form.block_factors or grouped:
        groups //= math.gcd(blocks, 8) if seed % 2 else blocks
    number = jnp.float32 if grouped or kind == "f8_e4m3" else jnp.float16

    def integers(low: int, high: int, per_block: int, dtype: type) -> jnp.ndarray:
        return jnp.asarray(rng.integers(low, high, (*rows, blocks * per_block), dtype))

    scales = jnp.asarray(rng.uniform(0.01, 0.1, (*rows, groups)), number)
    mins = jnp.asarray(rng.standard_normal((*rows, groups)), number) if form.has_mins else None
    if kind == "f8_e4m3":
        quants = jnp.asarray(rng.standard_normal((*rows, blocks * 32)) * 2.0 ** rng.integers(-9, 5), jnp.float8_e4m3fn)
    else:
        quants = integers(-128, 128, 32, np.int8) if form.is_bytes else integers(0, 256, 16, np.uint8)
    factors = form.block_factors
    return BlockQuantWeight(
        quants,
        scales,
        mins,
        kind,
        high_bits=integers(0, 256, 4 * form.high_bits, np.uint8) if form.high_bits else None,
        scale_factors=integers(-31 if factors == 2 else 0, 32, factors, np.int8) if factors else None,
        min_factors=integers(0, 32, factors, np.int8) if factors and form.has_mins else None,
    )
