"""Another runtime's page metadata, made into the plan of a provider: so that it can drive these kernels.

The metadata is what vLLM hands to its attention: 2-D `block_tables` padded row by row, `seq_lens` that count this
step's tokens, and `query_start_loc`. It is read by those names and packed in jax.numpy with shapes that depend on
shapes only, so all of it can happen inside a jitted step, and the result equals what the provider plans from the same
step's KvPageTableV1. Rows without queries are padding, whatever else they hold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kv_common.errors import JaxkvError
from kv_common.layout import PADDING_PAGE
from kv_kernels.native.provider import NativePlan
from kv_kernels.packed_rows import PackedRows, tokens_are_rows
from kv_kernels.provider import KernelProvider, PlanShape
from kv_kernels.reference import ReferencePlan, tile_width


class ForeignPlanError(JaxkvError):
    """Metadata of shapes that do not fit together, or a provider that cannot plan from it."""


class ForeignMetadata(Protocol):
    """What is read of another runtime's metadata, int32; rows of padding come last."""

    @property
    def block_tables(self) -> Any:
        """[rows, max_pages] the row's pages in sequence order; what lies past its last page is not read."""

    @property
    def seq_lens(self) -> Any:
        """[rows] tokens that the row attends over, this step's included."""

    @property
    def query_start_loc(self) -> Any:
        """[rows + 1] row r's new tokens are query_start_loc[r] to query_start_loc[r + 1]."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["write_slots", "positions", "row_of_token", "query_start", "page_indptr", "page_ids", "kv_len"],
    meta_fields=["shape", "tokens_per_page"],
)
@dataclass(frozen=True)
class ForeignTable:
    """The fields of KvPageTableV1, padded, int32: tokens of padding are written to the padding page, rows of padding
    have no pages.
    """

    write_slots: Any  # [tokens]
    positions: Any  # [tokens]
    row_of_token: Any  # [tokens]
    query_start: Any  # [rows + 1]
    page_indptr: Any  # [rows + 1]
    page_ids: Any  # [page_entries]
    kv_len: Any  # [rows]
    shape: PlanShape
    tokens_per_page: int


def foreign_table(metadata: ForeignMetadata, shape: PlanShape, tokens_per_page: int) -> ForeignTable:
    """`metadata` packed and padded to `shape`, which has room for every row at its longest. Raises ForeignPlanError."""
    block_tables, seq_lens = jnp.asarray(metadata.block_tables), jnp.asarray(metadata.seq_lens, jnp.int32)
    starts = jnp.asarray(metadata.query_start_loc, jnp.int32)
    _check(block_tables, seq_lens, starts, shape)
    query_start = _padded(starts, shape.rows + 1, starts[-1])
    query_len = jnp.diff(query_start)
    kv_len = jnp.where(query_len > 0, _padded(seq_lens, shape.rows, 0), 0)
    page_indptr = _indptr(-(-kv_len // tokens_per_page))
    entry = jnp.arange(shape.page_entries, dtype=jnp.int32)
    row = _row_of(page_indptr, entry)
    page_ids = _pages(block_tables, row, entry - page_indptr[row], entry < page_indptr[-1])
    token = jnp.arange(shape.tokens, dtype=jnp.int32)
    row_of_token, real = _row_of(query_start, token), token < starts[-1]
    positions = kv_len[row_of_token] - query_start[row_of_token + 1] + token
    positions = jnp.where(real, positions, 0)
    page = _pages(block_tables, row_of_token, positions // tokens_per_page, real)
    offset = jnp.where(real, positions, token) % tokens_per_page
    return ForeignTable(
        write_slots=page * tokens_per_page + offset,
        positions=positions,
        row_of_token=row_of_token,
        query_start=query_start,
        page_indptr=page_indptr,
        page_ids=page_ids,
        kv_len=kv_len,
        shape=shape,
        tokens_per_page=tokens_per_page,
    )


def foreign_plan(provider: KernelProvider, table: ForeignTable) -> Any:
    """What `provider.plan` makes of the same step.

    Raises ForeignPlanError for a provider that plans on the host; FlashInfer's `plan_rows` takes `packed_rows(table)`
    from there.
    """
    planner = _PLANNERS.get(provider.name)
    if planner is None:
        raise ForeignPlanError(
            f"provider {provider.name!r} makes no plan inside a jitted step; use one of {', '.join(_PLANNERS)}"
        )
    return planner(table)


def packed_rows(table: ForeignTable) -> PackedRows:
    """The rows as the vendors' kernels read them; see PackedRows."""
    shape, tokens_per_page = table.shape, table.tokens_per_page
    num_tokens, query_start = table.query_start[-1], table.query_start
    kv_len, row = table.kv_len, jnp.arange(shape.rows, dtype=jnp.int32)
    if tokens_are_rows(shape):
        query_start = jnp.arange(shape.rows + 1, dtype=jnp.int32)
        kv_len, row = jnp.where(row < num_tokens, table.positions + 1, 0), table.row_of_token
    page_count = jnp.maximum(-(-kv_len // tokens_per_page), 1)
    page_indptr = _indptr(page_count)
    entry = jnp.arange(shape.page_entries, dtype=jnp.int32)
    owner = _row_of(page_indptr, entry)
    source = table.page_indptr[row[owner]] + entry - page_indptr[owner]
    mapped = (entry < page_indptr[-1]) & (kv_len[owner] > 0)
    return PackedRows(
        num_tokens=num_tokens,
        query_start=query_start,
        page_indptr=page_indptr,
        page_ids=jnp.where(mapped, table.page_ids.at[source].get(mode="clip"), PADDING_PAGE),
        last_page_len=jnp.where(kv_len > 0, (kv_len - 1) % tokens_per_page + 1, 1),
    )


def _native_plan(table: ForeignTable) -> NativePlan:
    page_start: Any = jnp.where(jnp.diff(table.query_start) > 0, table.page_indptr[:-1], 0)
    return NativePlan(table.query_start, table.kv_len, page_start, table.page_ids)


def _reference_plan(table: ForeignTable) -> ReferencePlan:
    shape, width = table.shape, tile_width(table.shape)
    query_len = jnp.diff(table.query_start)
    tile_indptr = _indptr(-(-query_len // width))
    tile = jnp.arange(shape.tokens // width + (0 if width == 1 else shape.rows), dtype=jnp.int32)
    row, real = _row_of(tile_indptr, tile), tile < tile_indptr[-1]
    offset = (tile - tile_indptr[row]) * width
    arrays: dict[str, Any] = {
        "num_tiles": tile_indptr[-1],
        "tile_start": jnp.where(real, table.query_start[row] + offset, 0),
        "tile_position": jnp.where(real, (table.kv_len - query_len)[row] + offset, 0),
        "tile_row": jnp.where(real, row, 0),
        "kv_len": table.kv_len,
        "page_start": jnp.where(query_len > 0, table.page_indptr[:-1], 0),
        "page_ids": table.page_ids,
    }
    return ReferencePlan(**arrays)


_PLANNERS: dict[str, Callable[[ForeignTable], Any]] = {
    "reference": _reference_plan,
    "native": _native_plan,
    "aiter": packed_rows,
}


def _check(block_tables: jax.Array, seq_lens: jax.Array, starts: jax.Array, shape: PlanShape) -> None:
    if block_tables.ndim != 2 or seq_lens.shape != block_tables.shape[:1] or starts.shape != (seq_lens.size + 1,):
        raise ForeignPlanError(
            f"block_tables {list(block_tables.shape)}, seq_lens {list(seq_lens.shape)} and query_start_loc "
            f"{list(starts.shape)} do not fit together: give [rows, pages], [rows] and [rows + 1]"
        )
    rows, max_pages = block_tables.shape
    if rows > shape.rows or shape.page_entries < shape.rows * max_pages:
        raise ForeignPlanError(
            f"{rows} rows of up to {max_pages} pages do not fit a shape of {shape.rows} rows and {shape.page_entries} "
            f"page entries: it needs {max(rows, shape.rows)} rows and {max(rows, shape.rows) * max_pages} entries"
        )


def _padded(values: jax.Array, size: int, fill: jax.Array | int) -> jax.Array:
    return jnp.full(size, fill, jnp.int32).at[: values.shape[0]].set(values)


def _indptr(counts: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def _row_of(indptr: jax.Array, index: jax.Array) -> jax.Array:
    """The row that `index` [n] falls into by `indptr` [rows + 1]; the last one past the end."""
    row = jnp.searchsorted(indptr, index, side="right").astype(jnp.int32) - 1
    return jnp.minimum(row, indptr.shape[0] - 2)


def _pages(block_tables: jax.Array, row: jax.Array, column: jax.Array, real: jax.Array) -> jax.Array:
    pages = block_tables.at[row, column].get(mode="clip").astype(jnp.int32)
    return jnp.where(real, pages, PADDING_PAGE)
