"""The aiter provider: AITER's append, paged prefill and paged decode kernels on AMD, through jax-aiter.

Decode kernels are compiled ahead of time for the few configurations of `DECODES`; a step of single tokens outside them
(and any with a window, which the decode kernel does not have) takes the prefill kernel, which reads the same rows. A
soft cap is refused: the decode kernels ignore it in silence and no prefill kernel with one is built. Operands are
in the order of the vendor's handlers, which is part of their interface. Products are those of
`GpuKernels`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.page_table import KvPageTableV1
from kv_kernels.aiter.library import APPEND, DECODE, JAX_AITER, PREFILL, AiterLibrary
from kv_kernels.gpu_kernels import GpuKernels
from kv_kernels.packed_rows import PackedRows, longest_kv, pack_rows, tokens_are_rows
from kv_kernels.provider import KernelNeeds, PlanShape, PoolPair, Scoring


class Coverage(NamedTuple):
    """What a set of kernels is compiled for."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    page_sizes: tuple[int, ...]
    group_sizes: tuple[int, ...] | None  # None for any
    max_kv_len: int | None


PREFILLS = Coverage(("bfloat16", "float16"), (64, 128), (16, 32), None, None)
DECODES = Coverage(("bfloat16", "float16"), (128,), (16,), (1, 4, 8), 16384)


@dataclass(frozen=True)
class AiterProvider(GpuKernels):
    """bfloat16 and float16 pools, head_dim 64 and 128, pages of 16 and 32 tokens, any group size; windows, no soft
    cap.
    """

    library: AiterLibrary = JAX_AITER

    @property
    def name(self) -> str:
        return "aiter"

    def unsupported(self, needs: KernelNeeds) -> str | None:
        if needs.platform != "rocm":
            return f"its kernels run on rocm, not on {needs.platform}"
        if needs.kv_dtype not in PREFILLS.dtypes:
            return f"K/V dtype {needs.kv_dtype} is not one of {', '.join(PREFILLS.dtypes)}"
        if needs.head_dim not in PREFILLS.head_dims:
            return f"head_dim {needs.head_dim} is not one of {', '.join(map(str, PREFILLS.head_dims))}"
        if needs.tokens_per_page not in PREFILLS.page_sizes:
            return f"pages of {needs.tokens_per_page} tokens: it has 16 and 32"
        if needs.num_heads % needs.num_kv_heads:
            return f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} K/V heads"
        if needs.soft_cap is not None:
            return f"a soft cap of {needs.soft_cap:g}: its kernels have none"
        return self.library.why_missing()

    def plan(self, table: KvPageTableV1, shape: PlanShape) -> PackedRows:
        return pack_rows(table, shape)

    def append_kv(self, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair) -> PoolPair:
        one = jnp.ones(1, jnp.float32)
        # The kernel skips a negative slot and writes wherever else it is told to.
        inside = jnp.where(slots < pools.k.shape[0] * pools.k.shape[1], slots, -1)
        call = self._call(APPEND, [_like(pool) for pool in pools], input_output_aliases={5: 0, 6: 1})
        dtype = pools.k.dtype
        return PoolPair(
            *call(
                *(k_new.astype(dtype), v_new.astype(dtype), inside, one, one, *pools),
                kv_cache_dtype="auto",
            )
        )

    def paged_attention(
        self, q: jax.Array, pools: PoolPair, plan: PackedRows, *, first_page: jax.Array | int, scoring: Scoring
    ) -> jax.Array:
        if scoring.soft_cap is not None:
            raise ValueError(f"aiter has no soft cap, and a layer asks for one of {scoring.soft_cap:g}")
        query = q.astype(pools.k.dtype)
        shape = PlanShape(q.shape[0], plan.last_page_len.shape[0], plan.page_ids.shape[0])
        rows = (plan.page_indptr, plan.page_ids + jnp.asarray(first_page, jnp.int32), plan.last_page_len)
        if tokens_are_rows(shape) and self._can_decode(query, pools, shape, scoring):
            out = self._decode(query, pools, rows, longest_kv(shape, pools.k.shape[1]), scoring)
        else:
            out = self._prefill(query, pools, (plan.query_start, *rows), shape, scoring)
        # Nothing is written for a token that no row has.
        real = (jnp.arange(shape.tokens) < plan.num_tokens)[:, None, None]
        return jnp.where(real, out, 0).astype(q.dtype)

    def _can_decode(self, query: jax.Array, pools: PoolPair, shape: PlanShape, scoring: Scoring) -> bool:
        tokens_per_page, kv_heads, head_dim = pools.k.shape[1:]
        return (
            scoring.window is None
            and query.dtype.name in DECODES.dtypes
            and head_dim in DECODES.head_dims
            and tokens_per_page in DECODES.page_sizes
            and query.shape[1] // kv_heads in (DECODES.group_sizes or ())
            and longest_kv(shape, tokens_per_page) <= (DECODES.max_kv_len or 0)
        )

    def _decode(
        self, query: jax.Array, pools: PoolPair, rows: tuple[jax.Array, ...], max_seq_len: int, scoring: Scoring
    ) -> jax.Array:
        kernel = self.library.decode_kernel(
            query=_like(query),
            kv_heads=pools.k.shape[2],
            tokens_per_page=pools.k.shape[1],
            max_seq_len=max_seq_len,
        )
        one, workspace = jnp.ones(1, jnp.float32), jnp.zeros(kernel.workspace_bytes, jnp.uint8)
        out: jax.Array = self._call(DECODE, _like(query))(
            *(query, *pools, *rows, one, one, workspace),
            scale=np.float32(scoring.scale),
            logits_soft_cap=np.float32(0),
            max_num_partitions=np.int64(kernel.max_num_partitions),
            func_name=kernel.func_name,
        )
        return out

    def _prefill(
        self, query: jax.Array, pools: PoolPair, rows: tuple[jax.Array, ...], shape: PlanShape, scoring: Scoring
    ) -> jax.Array:
        out: jax.Array = self._call(PREFILL, _like(query))(
            *(query, *pools, *rows),
            scale=np.float32(scoring.scale),
            logits_soft_cap=np.float32(0),
            max_seqlen_q=np.int64(1 if tokens_are_rows(shape) else shape.tokens),
            max_seqlen_k=np.int64(longest_kv(shape, pools.k.shape[1])),
            causal=True,
            # Keys to the left of a query's own, which `window` counts as well; -1 for all.
            window_size_left=np.int64(-1 if scoring.window is None else scoring.window - 1),
            window_size_right=np.int64(-1 if scoring.window is None else 0),
        )
        return out

    def _call(self, target: str, results: Any, **settings: Any) -> Any:
        self.library.register(target)
        return jax.ffi.ffi_call(target, results, **settings)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
