"""The native provider: C++ kernels on a CPU, the default there.

Weights stay in their storage and activations stay float32 (half-width ones are widened exactly), so results agree with
the reference to rounding. A token's result has the same bits whatever its batch, its chunk or the number of threads.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.page_table import KvPageTableV1
from kv_kernels.native.library import NativeUnavailableError, load_library
from kv_kernels.provider import KernelNeeds, PlanShape, PoolPair
from kv_kernels.weights import DenseWeight, LayerIndex, Weight

POOL_DTYPES = ("float32", "bfloat16", "float16")


class NativePlan(NamedTuple):
    """The rows of a step, int32; rows of padding have no queries, and tokens of padding belong to no row."""

    query_start: np.ndarray  # [rows + 1]
    kv_len: np.ndarray  # [rows]
    page_start: np.ndarray  # [rows] first entry of the row in page_ids
    page_ids: np.ndarray  # [page_entries] pages of layer 0


def _padded(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


@dataclass(frozen=True)
class NativeProvider:
    """C++ kernels; float32, bfloat16 and float16 pools, any head_dim, group size, page size, window and soft cap."""

    @property
    def name(self) -> str:
        return "native"

    def unsupported(self, needs: KernelNeeds) -> str | None:
        if needs.platform != "cpu":
            return f"its kernels run on cpu, not on {needs.platform}"
        if needs.kv_dtype not in POOL_DTYPES:
            return f"K/V dtype {needs.kv_dtype} is not one of {', '.join(POOL_DTYPES)}"
        if needs.num_heads % needs.num_kv_heads:
            return f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} K/V heads"
        try:
            load_library()
        except NativeUnavailableError as error:
            return str(error)
        return None

    def plan(self, table: KvPageTableV1, shape: PlanShape) -> NativePlan:
        return NativePlan(
            query_start=_padded(table.query_start, shape.rows + 1, fill=int(table.query_start[-1])),
            kv_len=_padded(table.kv_len, shape.rows),
            page_start=_padded(table.page_indptr[:-1], shape.rows),
            page_ids=_padded(table.page_ids, shape.page_entries),
        )

    def append_kv(self, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair) -> PoolPair:
        results = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
        call = _call("jaxkv_append_kv", results, input_output_aliases={3: 0, 4: 1})
        return PoolPair(*call(k_new, v_new, slots, pools.k, pools.v))

    def paged_attention(
        self,
        q: jax.Array,
        pools: PoolPair,
        plan: NativePlan,
        *,
        first_page: jax.Array | int,
        scale: np.float32,
        window: int | None,
        soft_cap: float | None,
    ) -> jax.Array:
        call = _call("jaxkv_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
        out: jax.Array = call(
            q,
            pools.k,
            pools.v,
            jnp.asarray(first_page, jnp.int32),
            *plan,
            scale=np.float32(scale),
            soft_cap=np.float32(soft_cap or 0),
            window=window or 0,
        )
        return out

    def linear(
        self, x: jax.Array, weight: Weight, layer: LayerIndex | None, out_dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        result = jax.ShapeDtypeStruct((x.shape[0], weight.out_features), jnp.dtype(out_dtype or x.dtype))
        out: jax.Array = _call("jaxkv_linear", result)(x, *_weight_operands(weight, layer), kind=_kind(weight))
        return out

    def embed(self, token_ids: jax.Array, weight: Weight) -> jax.Array:
        result = jax.ShapeDtypeStruct((token_ids.shape[0], weight.in_features), jnp.float32)
        out: jax.Array = _call("jaxkv_embed", result)(token_ids, *_weight_operands(weight, 0), kind=_kind(weight))
        return out


def _call(target: str, results: Any, **settings: Any) -> Any:
    load_library()
    return jax.ffi.ffi_call(target, results, **settings)


def _weight_operands(weight: Weight, layer: LayerIndex | None) -> list[Any]:
    """The layer's index [] i32, then the whole stack: the kernel picks the layer, so none is sliced out."""
    return [jnp.asarray(0 if layer is None else layer, jnp.int32), *jax.tree.leaves(weight)]


def _kind(weight: Weight) -> str:
    return "dense" if isinstance(weight, DenseWeight) else weight.kind
