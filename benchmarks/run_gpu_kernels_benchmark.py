"""Append, prefill and decode of a GPU's kernel providers, beside what the card itself can do.

One layer of a model of 8 billion parameters (32 heads over 8 K/V heads of 128) unless told otherwise. The card's limits
are measured in the same run, by XLA: bytes moved per second by a pass over memory, and multiply-adds per second by a
product of large matrices. Every figure repeats its operation inside one program, over layers that do not fit a cache
together, so that neither the host nor the cache is measured. JSON lines, and a table on stderr; a line and status 0
where there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from reporting import figure_from_passes, print_figure

from kv_common.page_table import KvPageTableV1
from kv_kernels.provider import KernelNeeds, KernelProvider, PlanShape, PoolPair, Scoring
from kv_kernels.selection import ProviderError, choose_provider, current_platform

MAX_DISAGREEMENT = 0.1


class Sizes(NamedTuple):
    """One layer, and how large the rest is."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tokens_per_page: int = 16
    dtype: str = "bfloat16"
    pool_bytes: int = 4 << 30
    repeats: int = 20
    limit_bytes: int = 4 << 30
    matrix: int = 8192
    appends: tuple[int, ...] = (64, 8192)
    prefills: tuple[tuple[int, int], ...] = ((512, 512), (4096, 4096), (1024, 16384))
    """(query tokens, tokens with the context before them)"""
    decodes: tuple[tuple[int, int], ...] = ((1, 1024), (1, 32768), (16, 4096), (128, 1024), (128, 4096))
    """(rows, tokens of each)"""

    @property
    def row_bytes(self) -> int:
        """K and V of a token."""
        return 2 * self.kv_heads * self.head_dim * np.dtype(jnp.dtype(self.dtype)).itemsize


class Limits(NamedTuple):
    """Bytes and floating-point operations a second."""

    bytes_per_s: float
    flops_per_s: float


class Work(NamedTuple):
    """What an operation cannot do without."""

    bytes: float
    flops: float


def main(arguments: list[str] | None = None) -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=5, help="measured passes of each figure (default 5)")
    parser.add_argument("--providers", nargs="*", default=["pallas"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    platform = current_platform()
    if platform not in ("cuda", "rocm"):
        print(f"no GPU: jax runs on {platform}; nothing to measure")
        return
    sizes = Sizes(dtype=options.dtype)
    limits = measure_limits(sizes, options.passes)
    for name in options.providers:
        needs = KernelNeeds(platform, sizes.dtype, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.tokens_per_page)
        try:
            provider = choose_provider(needs, name).provider
        except ProviderError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        measure_provider(provider, sizes, limits, options.passes)


def measure_limits(sizes: Sizes, passes: int) -> Limits:
    """What the card moves and multiplies in a second."""
    count = sizes.limit_bytes // 4
    array = jnp.ones(count, jnp.float32)
    add_one = jax.jit(lambda x: x + 1)
    moved = [2 * 4 * count / seconds for seconds in timed(lambda: add_one(array), passes)]
    a = jnp.ones((sizes.matrix, sizes.matrix), sizes.dtype)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32).astype(a.dtype))
    multiplied = [2 * sizes.matrix**3 / seconds for seconds in timed(lambda: product(a), passes)]
    report("device.bandwidth", [each / 1e9 for each in moved], "GB/s", sizes, {})
    report("device.product_rate", [each / 1e12 for each in multiplied], "TFLOP/s", sizes, {})
    return Limits(float(np.median(moved)), float(np.median(multiplied)))


def measure_provider(provider: KernelProvider, sizes: Sizes, limits: Limits, passes: int) -> None:
    """Every figure of a provider, over pools made once."""
    pools = make_pools(sizes)
    row = sizes.row_bytes
    query_bytes = row // 2 * sizes.heads // sizes.kv_heads  # read, and written as values
    flops_per_pair = 4 * sizes.heads * sizes.head_dim

    def measure(name: str, operation: Callable[[], object], work: Work, workload: dict[str, object]) -> None:
        passed = [seconds / sizes.repeats for seconds in timed(operation, passes)]
        report_operation(f"{provider.name}.{name}", passed, work, limits, sizes, workload)

    for tokens in sizes.appends:
        append = Appends(provider, sizes, pools, tokens)
        measure("append", append, Work(2 * tokens * row, 0), {"tokens": tokens})
        pools = append.pools
    for queries, context in sizes.prefills:
        pairs = queries * (context - queries) + queries * (queries + 1) / 2
        work = Work(context * row + 2 * queries * query_bytes, pairs * flops_per_pair)
        operation = attentions(provider, sizes, pools, [queries], [context])
        measure("prefill", operation, work, {"tokens": queries, "context": context})
    for rows, context in sizes.decodes:
        work = Work(rows * context * row + 2 * rows * query_bytes, rows * context * flops_per_pair)
        operation = attentions(provider, sizes, pools, [1] * rows, [context] * rows)
        measure("decode", operation, work, {"rows": rows, "context": context})


def make_pools(sizes: Sizes) -> PoolPair:
    """Random K/V in pools of `sizes.pool_bytes` together."""
    pages = sizes.pool_bytes // (sizes.row_bytes * sizes.tokens_per_page)
    shape = (pages, sizes.tokens_per_page, sizes.kv_heads, sizes.head_dim)
    return PoolPair(
        *(jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, sizes.dtype))(i) for i in (0, 1))
    )


class Appends:
    """Appends of `tokens` tokens one after another, at random slots; owns the pools, which every call gives away."""

    def __init__(self, provider: KernelProvider, sizes: Sizes, pools: PoolPair, tokens: int) -> None:
        self.pools = pools
        rng = np.random.default_rng(0)
        num_slots = pools.k.shape[0] * sizes.tokens_per_page
        self._slots = jnp.asarray(rng.choice(num_slots, (sizes.repeats, tokens)).astype(np.int32))
        self._new = jnp.ones((tokens, sizes.kv_heads, sizes.head_dim), sizes.dtype)

        def run(pools: PoolPair, new: jax.Array, slots: jax.Array) -> PoolPair:
            def append(index: jax.Array, pools: PoolPair) -> PoolPair:
                return provider.append_kv(new, new, slots[index], pools)

            return lax.fori_loop(0, sizes.repeats, append, pools)

        self._run = jax.jit(run, donate_argnums=0)

    def __call__(self) -> PoolPair:
        self.pools = self._run(self.pools, self._new, self._slots)
        return self.pools


def attentions(
    provider: KernelProvider, sizes: Sizes, pools: PoolPair, query_len: list[int], kv_len: list[int]
) -> Callable[[], object]:
    """Attention of one step, over one layer after another as far as the pools reach."""
    table = page_table(query_len, kv_len, sizes.tokens_per_page)
    pages = int(table.page_ids.max()) + 1
    layers = max(1, pools.k.shape[0] // pages)
    plan = jax.device_put(provider.plan(table, PlanShape(table.tokens, table.rows, len(table.page_ids))))
    scoring = Scoring(np.float32(sizes.head_dim**-0.5))
    q = jax.random.normal(jax.random.key(2), (table.tokens, sizes.heads, sizes.head_dim), sizes.dtype)

    @jax.jit
    def run(q: jax.Array, pools: PoolPair, plan: Any) -> jax.Array:
        def attend(index: jax.Array, q: jax.Array) -> jax.Array:
            return provider.paged_attention(q, pools, plan, first_page=index % layers * pages, scoring=scoring)

        return lax.fori_loop(0, sizes.repeats, attend, q)

    return functools.partial(run, q, pools, plan)


def page_table(query_len: list[int], kv_len: list[int], tokens_per_page: int) -> KvPageTableV1:
    """Rows whose pages lie anywhere among each other."""
    counts = [-(-length // tokens_per_page) for length in kv_len]
    ids = np.random.default_rng(0).permutation(np.arange(1, 1 + sum(counts))).astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lengths = zip(query_len, kv_len, strict=True)
    positions = np.concatenate([np.arange(total - new, total) for new, total in lengths]).astype(np.int32)
    row = np.repeat(np.arange(len(kv_len)), query_len)
    return KvPageTableV1(
        write_slots=ids[indptr[row] + positions // tokens_per_page] * tokens_per_page + positions % tokens_per_page,
        positions=positions,
        query_start=np.concatenate([[0], np.cumsum(query_len)]).astype(np.int32),
        page_indptr=indptr,
        page_ids=ids,
        last_page_len=(np.asarray(kv_len, np.int32) - 1) % tokens_per_page + 1,
        kv_len=np.asarray(kv_len, np.int32),
        tokens_per_page=tokens_per_page,
    )


def timed(operation: Callable[[], object], passes: int) -> list[float]:
    """Seconds of each pass, after one that compiles."""
    jax.block_until_ready(operation())
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        jax.block_until_ready(operation())
        seconds.append(time.perf_counter() - start)
    return seconds


def report_operation(
    name: str, seconds: list[float], work: Work, limits: Limits, sizes: Sizes, workload: dict[str, object]
) -> None:
    """Time, and the share of it that the card's limits ask for."""
    least = max(work.bytes / limits.bytes_per_s, work.flops / limits.flops_per_s)
    bound = "FLOPs" if work.flops / limits.flops_per_s == least else "bandwidth"
    label = "_".join(f"{key}{value}" for key, value in workload.items())
    report(f"{name}.{label}.time", [each * 1e6 for each in seconds], "us", sizes, workload)
    report(f"{name}.{label}.of_{bound}", [least / each * 100 for each in seconds], "%", sizes, workload)


def report(name: str, values: list[float], unit: str, sizes: Sizes, workload: dict[str, object]) -> None:
    """One figure as JSON and as a line for people."""
    described = {"device": jax.devices()[0].device_kind, **workload}
    figure = figure_from_passes(
        name, values, unit, workload=described, dtype=sizes.dtype, threads=1, max_disagreement=MAX_DISAGREEMENT
    )
    print_figure(figure)
    print(f"{name:<52} {figure.value:10.2f} {unit}  {figure.reason or ''}", file=sys.stderr)


if __name__ == "__main__":
    main()
