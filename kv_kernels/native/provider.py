"""The native provider: C++ kernels on a CPU, the default there.

Weights stay in their storage and activations stay float32 (half-width ones are widened exactly), so results agree with
the reference to rounding. On levels made for it bfloat16 activations are multiplied as such by weights rounded to
bfloat16, or as integers of 16 bits by exact ones. Everywhere a token's result has the same bits whatever its batch,
chunk or number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.page_table import KvPageTableV1
from kv_kernels.composition import ComposedKernels, switch_part
from kv_kernels.native.library import NativeUnavailableError, load_library
from kv_kernels.provider import (
    Activation,
    Affine,
    CacheAttended,
    KernelNeeds,
    Norm,
    Placement,
    PlanShape,
    PoolPair,
    Rotation,
    Scoring,
    Tiles,
)
from kv_kernels.weights import DenseWeight, LayerIndex, MixedWeight, StoredWeight, Weight

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
    """C++ kernels; float32, bfloat16 and float16 pools, any head_dim, group size, page size, window and soft cap.

    With `int8_activations` x is rounded to 8 bits, 32 numbers with one scale, where weights of 4 bits meet
    it, or of 8 in blocks of 32.
    """

    int8_activations: bool = False

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
            library = load_library()
        except NativeUnavailableError as error:
            return str(error)
        if needs.int8_activations and not library.has_int8_products:
            return f"its kernels for {library.level} gain nothing by int8_activations: leave them out"
        return None

    def plan(self, table: KvPageTableV1, shape: PlanShape) -> NativePlan:
        return NativePlan(
            query_start=_padded(table.query_start, shape.rows + 1, fill=int(table.query_start[-1])),
            kv_len=_padded(table.kv_len, shape.rows),
            page_start=_padded(table.page_indptr[:-1], shape.rows),
            page_ids=_padded(table.page_ids, shape.page_entries),
        )

    def later(self, plan: NativePlan, steps: jax.Array | int) -> NativePlan:
        return plan._replace(kv_len=plan.kv_len + steps)

    def append_kv(self, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair) -> PoolPair:
        results = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
        call = _call("jaxkv_append_kv", results, input_output_aliases={3: 0, 4: 1})
        return PoolPair(*call(k_new, v_new, slots, pools.k, pools.v))

    def paged_attention(
        self, q: jax.Array, pools: PoolPair, plan: NativePlan, *, first_page: jax.Array | int, scoring: Scoring
    ) -> jax.Array:
        call = _call("jaxkv_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
        out: jax.Array = call(q, pools.k, pools.v, _index(first_page), *plan, **_attributes(scoring))
        return out

    def product(
        self, x: jax.Array, weight: Weight, layer: LayerIndex | None, out_dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        if isinstance(weight, MixedWeight):
            return switch_part(weight, layer, lambda part, at: self.product(x, part, at, out_dtype))
        (out,) = self.linear(x, (Affine(weight),), layer, out_dtype=out_dtype)
        return out

    def normalize(self, x: jax.Array, norm: Norm, layer: LayerIndex | None) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        call = _call("jaxkv_normalize", jax.ShapeDtypeStruct(rows.shape, rows.dtype))
        out: jax.Array = call(rows, _index(0 if layer is None else layer), norm.weight, norm_eps=np.float32(norm.eps))
        return out.reshape(x.shape)

    def linear(
        self,
        x: jax.Array,
        matrices: Sequence[Affine],
        layer: LayerIndex | None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
        activation: Activation | None = None,
        out_dtype: jax.typing.DTypeLike | None = None,
        used: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        weights = [matrix.weight for matrix in matrices if not isinstance(matrix.weight, MixedWeight)]
        # Each way of storing weights reads x in a form of its own.
        if len(weights) < len(matrices) or len({_storage(weight) for weight in weights}) > 1:
            return ComposedKernels.linear(
                *(self, x, matrices, layer),
                norm=norm,
                residual=residual,
                activation=activation,
                out_dtype=out_dtype,
            )
        dtype = jnp.dtype(out_dtype or x.dtype)
        sizes = [matrix.weight.out_features for matrix in (matrices[:1] if activation else matrices)]
        operands: list[Any] = [] if norm is None else [norm.weight]
        operands += [] if residual is None else [residual]
        for matrix in matrices:
            operands += [*jax.tree.leaves(matrix.weight), *([] if matrix.bias is None else [matrix.bias])]
        call = _call("jaxkv_linear", [jax.ShapeDtypeStruct((x.shape[0], size), dtype) for size in sizes])
        return tuple(
            call(
                x,
                _index(0 if layer is None else layer),
                _index(x.shape[0] if used is None else used),
                *operands,
                kinds=",".join(map(_stored, matrices)),
                norm_eps=np.float32(-1 if norm is None else norm.eps),
                has_residual=residual is not None,
                activation=activation or "",
                int8_x=self.int8_activations,
            )
        )

    def grouped_mlp(
        self,
        x: jax.Array,
        gate: Weight,
        up: Weight,
        down: Weight,
        tiles: Tiles,
        k: int,
        *,
        activation: Activation,
    ) -> jax.Array:
        # A tile's passes take all threads already, and read its matrices once.
        return ComposedKernels.grouped_mlp(self, x, gate, up, down, tiles, k, activation=activation)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pools: PoolPair,
        placement: Placement,
        plan: NativePlan,
        *,
        layer: LayerIndex,
        num_pages: int,
        scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> CacheAttended:
        by = rotation or Rotation(*(jnp.zeros((q.shape[0], 0)),) * 2)
        operands = (q, k, v, *by, _index(layer), *placement, *plan)
        results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, *pools)]
        aliases = {len(operands): 1, len(operands) + 1: 2}
        call = _call("jaxkv_attend", results, input_output_aliases=aliases)
        values, *after = call(*operands, *pools, num_pages=num_pages, **_attributes(scoring))
        return CacheAttended(values, PoolPair(*after))

    def embed(self, token_ids: jax.Array, weight: StoredWeight) -> jax.Array:
        result = jax.ShapeDtypeStruct((token_ids.shape[0], weight.in_features), jnp.float32)
        out: jax.Array = _call("jaxkv_embed", result)(
            token_ids, _index(0), *jax.tree.leaves(weight), kind=_kind(weight)
        )
        return out

    def zeros(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        out: jax.Array = _call("jaxkv_zeros", jax.ShapeDtypeStruct(shape, dtype))()
        return out

    def most_likely(self, x: jax.Array, matrix: Affine, *, norm: Norm, used: jax.Array | None = None) -> jax.Array:
        operands = [norm.weight, *jax.tree.leaves(matrix.weight), *([] if matrix.bias is None else [matrix.bias])]
        call = _call("jaxkv_most_likely", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
        out: jax.Array = call(
            *(x, _index(0), _index(x.shape[0] if used is None else used), *operands),
            kind=_stored(matrix),
            norm_eps=np.float32(norm.eps),
            int8_x=self.int8_activations,
        )
        return out

    def argmax(self, scores: jax.Array) -> jax.Array:
        out: jax.Array = _call("jaxkv_argmax", jax.ShapeDtypeStruct(scores.shape[:1], jnp.int32))(scores)
        return out


def _call(target: str, results: Any, **settings: Any) -> Any:
    load_library()
    return jax.ffi.ffi_call(target, results, **settings)


def _index(value: LayerIndex) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


def _attributes(scoring: Scoring) -> dict[str, Any]:
    # Numpy's float32: a Python float would become an attribute of 64 bits.
    return {
        "scale": np.float32(scoring.scale),
        "soft_cap": np.float32(scoring.soft_cap or 0),
        "window": scoring.window or 0,
    }


def _storage(weight: StoredWeight) -> tuple[Any, ...]:
    """What two weights have in common that read x in one form."""
    return (_kind(weight), *((leaf.dtype, leaf.shape[-1]) for leaf in jax.tree.leaves(weight)))


def _stored(matrix: Affine) -> str:
    """What the kernels read a matrix by."""
    assert not isinstance(matrix.weight, MixedWeight)  # whose parts are multiplied apart
    return _kind(matrix.weight) + ("" if matrix.bias is None else "+bias")


def _kind(weight: StoredWeight) -> str:
    if isinstance(weight, DenseWeight):
        return "dense"
    return f"{weight.kind}_tiles" if weight.in_tiles else weight.kind
