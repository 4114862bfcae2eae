"""The pallas provider: Triton kernels of our own for CUDA and ROCm; all but the cache and mixtures of experts is XLA's.

Pallas runs them on a GPU through Triton, and interprets them on a CPU: slow, for tests, and never chosen but by name.
"""

from dataclasses import dataclass

import jax

from kv_common.page_table import KvPageTableV1
from kv_kernels.gpu_kernels import GpuKernels
from kv_kernels.pallas.append import append_rows
from kv_kernels.pallas.attention import paged_attention
from kv_kernels.pallas.plan import PallasPlan, make_plan
from kv_kernels.provider import KernelNeeds, PlanShape, PoolPair, Scoring

POOL_DTYPES = ("float32", "bfloat16", "float16")
GPU_PLATFORMS = ("cuda", "rocm")
MAX_GROUP = 64
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class PallasProvider(GpuKernels):
    """Pallas kernels in Triton's dialect; float32, bfloat16 and float16 pools, any page size, window and soft cap.

    `interpret` runs them on a CPU.
    """

    interpret: bool = False

    @property
    def name(self) -> str:
        return "pallas"

    def unsupported(self, needs: KernelNeeds) -> str | None:
        if needs.platform not in (("cpu",) if self.interpret else GPU_PLATFORMS):
            return f"its kernels run on {' and '.join(GPU_PLATFORMS)}, or interpreted on cpu, not on {needs.platform}"
        if needs.kv_dtype not in POOL_DTYPES:
            return f"K/V dtype {needs.kv_dtype} is not one of {', '.join(POOL_DTYPES)}"
        if needs.num_heads % needs.num_kv_heads:
            return f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} K/V heads"
        if needs.num_heads > MAX_GROUP * needs.num_kv_heads:
            return f"{needs.num_heads // needs.num_kv_heads} heads share a K/V head, more than {MAX_GROUP}"
        if needs.head_dim > MAX_HEAD_DIM:
            return f"head_dim {needs.head_dim} is above {MAX_HEAD_DIM}"
        return None

    def plan(self, table: KvPageTableV1, shape: PlanShape) -> PallasPlan:
        return make_plan(table, shape)

    def append_kv(self, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair) -> PoolPair:
        return append_rows(k_new, v_new, slots, pools, interpret=self.interpret)

    def paged_attention(
        self, q: jax.Array, pools: PoolPair, plan: PallasPlan, *, first_page: jax.Array | int, scoring: Scoring
    ) -> jax.Array:
        return paged_attention(q, pools, plan, first_page=first_page, scoring=scoring, interpret=self.interpret)
