"""The flashinfer provider: FlashInfer's append, batch prefill and batch decode kernels on NVIDIA.

`plan` makes the vendor's schedule on the host, outside the jitted step, in CUDA-graph mode: what it says of sizes and
offsets is then the same for every step of a shape, and a static attribute, while the schedule itself is an operand.
Scratch is a result that nobody reads. The append has neither slots nor bounds, so that every token is handed over as a
request of one page, and what is to be written nowhere goes to the padding page. Products are those of
`GpuKernels`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.errors import JaxkvError
from kv_common.page_table import KvPageTableV1
from kv_kernels.flashinfer.calls import APPEND, CAUSAL, NHD, PAGE_MODULE, Call, Modules, decode_call, prefill_call
from kv_kernels.flashinfer.library import PREBUILT, FlashInferLibrary
from kv_kernels.gpu_kernels import GpuKernels
from kv_kernels.packed_rows import PackedRows, pack_rows, tokens_are_rows
from kv_kernels.provider import KernelNeeds, PlanShape, PoolPair, Scoring

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
DECODE_GROUP_SIZES = (1, 2, 3, 4, 6, 8)
"""Groups that the decode kernel has; others decode with the prefill kernel."""

SMALLEST_SCRATCH_BYTES = 128 << 20
LARGEST_TILE = 128
"""Query rows, heads of a group counted apart, of the prefill kernel's largest tile."""
MOST_BLOCKS = 2 * 192
"""Blocks that the prefill kernel fills a GPU with: two a multiprocessor, of which there are GPUs with up to 192."""


class FlashInferError(JaxkvError):
    """A layer that asks for what its step was not planned for."""


class Static(NamedTuple):
    """What a compiled step is specific to."""

    plan_info: tuple[int, ...]
    scratch_bytes: int


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "schedule"], meta_fields=["static"])
@dataclass(frozen=True)
class FlashInferPlan:
    """The rows of a step, the vendor's schedule for them [bytes] u8, and what both are read by."""

    rows: PackedRows
    schedule: Any
    static: Static


@dataclass(frozen=True)
class FlashInferProvider(GpuKernels):
    """bfloat16 and float16 pools, head_dim 64, 128 and 256, any group size, page size, window and soft cap; for one
    model, since the schedule depends on its sizes.
    """

    needs: KernelNeeds
    library: FlashInferLibrary = PREBUILT

    @property
    def name(self) -> str:
        return "flashinfer"

    def unsupported(self, needs: KernelNeeds) -> str | None:
        if needs.platform != "cuda":
            return f"its kernels run on cuda, not on {needs.platform}"
        if needs.kv_dtype not in DTYPES:
            return f"K/V dtype {needs.kv_dtype} is not one of {', '.join(DTYPES)}"
        if needs.head_dim not in HEAD_DIMS:
            return f"head_dim {needs.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if needs.num_heads % needs.num_kv_heads:
            return f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} K/V heads"
        modules = _modules(needs)
        return self.library.why_missing((PAGE_MODULE, modules.prefill, modules.decode))

    def plan(self, table: KvPageTableV1, shape: PlanShape) -> FlashInferPlan:
        return self.plan_rows(pack_rows(table, shape), shape)

    def plan_rows(self, rows: PackedRows, shape: PlanShape) -> FlashInferPlan:
        """The plan of rows in host memory."""
        needs = self.needs
        scratch_bytes, schedule = _scratch_bytes(needs, shape), np.zeros(_schedule_bytes(needs, shape), np.uint8)
        page_indptr = np.array(rows.page_indptr, np.int32)
        modules, sizes = _modules(needs), (needs.num_heads, needs.num_kv_heads, needs.tokens_per_page)
        if _decodes(needs, shape):
            of_dtype = np.zeros(0, np.float16)  # only its type is read, and a module has one
            arguments: tuple[Any, ...] = (page_indptr, shape.rows, *sizes, True, _window_left(needs.window))
            arguments += (float(needs.soft_cap or 0), needs.head_dim, needs.head_dim, of_dtype, of_dtype)
            module = modules.decode
        else:
            kv_len = (np.diff(page_indptr) - 1) * needs.tokens_per_page + np.asarray(rows.last_page_len)
            arguments = (np.array(rows.query_start, np.int32), page_indptr, kv_len.astype(np.int32))
            arguments += (shape.tokens, shape.rows, *sizes, True, needs.head_dim, needs.head_dim, True)
            # The last four: no fixed split, splitting on, no decode beside it, and no promise of equal lengths.
            # Without splitting the kernel takes the padding of a schedule for work.
            arguments += (_window_left(needs.window), -1, False, 0, 0)
            module = modules.prefill
        plan_info = self.library.plan(module, scratch_bytes, schedule, *arguments)
        return FlashInferPlan(rows, schedule, Static(plan_info, scratch_bytes))

    def append_kv(self, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair) -> PoolPair:
        num_pages, tokens_per_page = pools.k.shape[:2]
        tokens, dtype = slots.shape[0], pools.k.dtype
        inside = jnp.where((slots >= 0) & (slots < num_pages * tokens_per_page), slots, 0)
        request = jnp.arange(tokens + 1, dtype=jnp.int32)
        lengths = jnp.ones(tokens, jnp.int32)  # the kernel has no use for them
        call = self._call(APPEND, [_like(pool) for pool in pools], input_output_aliases={4: 0, 5: 1})
        return PoolPair(
            *call(
                *(k_new.astype(dtype), v_new.astype(dtype), request[:-1], inside % tokens_per_page, *pools),
                *(inside // tokens_per_page, request, lengths),
                layout=NHD,
            )
        )

    def paged_attention(
        self, q: jax.Array, pools: PoolPair, plan: FlashInferPlan, *, first_page: jax.Array | int, scoring: Scoring
    ) -> jax.Array:
        needs, rows = self.needs, plan.rows
        if (scoring.window, scoring.soft_cap) != (needs.window, needs.soft_cap):
            raise FlashInferError(
                f"a layer has window {scoring.window} and soft cap {scoring.soft_cap}, but its step is planned for "
                f"{needs.window} and {needs.soft_cap}: use another provider for a model whose layers differ"
            )
        query = q.astype(pools.k.dtype)
        shape = PlanShape(q.shape[0], rows.last_page_len.shape[0], rows.page_ids.shape[0])
        pages = (rows.page_indptr, rows.page_ids + jnp.asarray(first_page, jnp.int32), rows.last_page_len)
        attributes: dict[str, Any] = {
            "plan_info": np.asarray(plan.static.plan_info, np.int64),
            "layout": NHD,
            "window_left": _window_left(scoring.window),
            "logits_soft_cap": np.float32(scoring.soft_cap or 0),
            "sm_scale": np.float32(scoring.scale),
        }
        if _decodes(needs, shape):
            call, operands = decode_call(_modules(needs).decode), list(pages)
        else:
            call, operands = prefill_call(_modules(needs).prefill), [rows.query_start, *pages]
            attributes["mask_mode"] = CAUSAL
        results = [_like(query), jax.ShapeDtypeStruct((plan.static.scratch_bytes,), jnp.uint8)]
        out, _ = self._call(call, results)(plan.schedule, query, *pools, *operands, **attributes)
        # Nothing is written for a token that no row has.
        real = (jnp.arange(shape.tokens) < rows.num_tokens)[:, None, None]
        return jnp.where(real, out, 0).astype(q.dtype)

    def _call(self, call: Call, results: Any, **settings: Any) -> Any:
        self.library.register(call)
        return jax.ffi.ffi_call(call.target, results, **settings)


def _modules(needs: KernelNeeds) -> Modules:
    return Modules(needs.kv_dtype, needs.head_dim, needs.window is not None, needs.soft_cap is not None)


def _decodes(needs: KernelNeeds, shape: PlanShape) -> bool:
    return tokens_are_rows(shape) and needs.num_heads // needs.num_kv_heads in DECODE_GROUP_SIZES


def _window_left(window: int | None) -> int:
    """Keys to the left of a query's own, which `window` counts as well; -1 for all."""
    return -1 if window is None else window - 1


def _scratch_bytes(needs: KernelNeeds, shape: PlanShape) -> int:
    """The vendor's advice, or where that is more, partial results [heads, head_dim + 1] f32 of every query row: as many
    as the step has, tiles rounded up, or as fill a GPU. `plan` refuses what is too small.
    """
    group = needs.num_heads // needs.num_kv_heads
    filling = -(-MOST_BLOCKS // needs.num_kv_heads) * LARGEST_TILE
    query_rows = max(shape.tokens * group + shape.rows * LARGEST_TILE, filling)
    partial_bytes = 4 * needs.num_heads * query_rows * (needs.head_dim + 1)
    return max(SMALLEST_SCRATCH_BYTES, -(-partial_bytes // 256) * 256)


def _schedule_bytes(needs: KernelNeeds, shape: PlanShape) -> int:
    """Room for 32 bytes a work item (tiles of at least 16 query rows, or as many as fill a GPU) and a token. `plan`
    refuses what is too small.
    """
    group = needs.num_heads // needs.num_kv_heads
    items = 4096 + -(-shape.tokens * group // 16) + shape.rows
    return 32 * (items + shape.tokens)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
