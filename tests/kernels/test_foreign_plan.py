"""Plans made of another runtime's metadata, inside a jitted step, against those of the equivalent page table."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import dense_answer, make_case

from kv_common.page_table import KvPageTableV1
from kv_kernels.aiter import AiterProvider
from kv_kernels.flashinfer import FlashInferProvider
from kv_kernels.foreign_plan import ForeignPlanError, foreign_plan, foreign_table, packed_rows
from kv_kernels.native import NativeProvider
from kv_kernels.provider import KernelNeeds, PlanShape, Scoring
from kv_kernels.reference import ReferenceProvider

PLANNERS = (ReferenceProvider(), NativeProvider(), AiterProvider())
MAX_PAGES = 5


def vllm_shaped(table: KvPageTableV1, rows: int) -> SimpleNamespace:
    """The table as vLLM would have it: one row of pages a request, nonsense past the last page and in padded rows."""
    block_tables = np.full((rows, MAX_PAGES), -7, np.int32)
    seq_lens, starts = np.full(rows, 99, np.int32), np.full(rows + 1, table.tokens, np.int32)
    for row in range(table.rows):
        pages = table.page_ids[table.page_indptr[row] : table.page_indptr[row + 1]]
        block_tables[row, : len(pages)] = pages
        seq_lens[row] = table.kv_len[row]
    starts[: table.rows + 1] = table.query_start
    return SimpleNamespace(block_tables=block_tables, seq_lens=seq_lens, query_start_loc=starts)


def traced(shape: PlanShape, tokens_per_page: int, function):
    """`function` of the table of any metadata, everything under jit: no value of it is known while it is traced."""

    @jax.jit
    def run(block_tables, seq_lens, query_start_loc):
        given = SimpleNamespace(block_tables=block_tables, seq_lens=seq_lens, query_start_loc=query_start_loc)
        return function(foreign_table(given, shape, tokens_per_page))

    return lambda metadata: run(**vars(metadata))


@functools.cache
def traced_plans(shape: PlanShape):
    return traced(shape, 8, lambda packed: (packed, [foreign_plan(each, packed) for each in PLANNERS]))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=4),
    each_a_row=st.booleans(),
)
def test_a_traced_plan_is_the_one_of_the_page_table(lengths, each_a_row):
    kv_len = [before + new for before, new in lengths]
    table = make_case(0, kv_len=kv_len, query_len=[new for _, new in lengths], tokens_per_page=8, layers=1).table
    rows = 40 if each_a_row else 5
    shape = PlanShape(40, rows, rows * MAX_PAGES)
    packed, plans = traced_plans(shape)(vllm_shaped(table, rows=4))
    for provider, plan in zip(PLANNERS, plans, strict=True):
        jax.tree.map(np.testing.assert_array_equal, plan, provider.plan(table, shape))
        assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(plan))
    np.testing.assert_array_equal(packed.write_slots[: table.tokens], table.write_slots)
    np.testing.assert_array_equal(packed.positions[: table.tokens], table.positions)
    # Tokens of padding write into the padding page.
    assert (np.asarray(packed.write_slots[table.tokens :]) < 8).all()


def test_metadata_of_another_runtime_drives_the_kernels():
    case = make_case(3, kv_len=[37, 9, 20], query_len=[5, 9, 1], tokens_per_page=8)
    shape = PlanShape(16, 4, 4 * MAX_PAGES)
    q = np.zeros((16, *case.q.shape[1:]), np.float32)
    q[: len(case.q)] = case.q
    for provider in (ReferenceProvider(), NativeProvider()):

        def attend(table, provider=provider):
            return provider.paged_attention(
                jnp.asarray(q),
                case.pools,
                foreign_plan(provider, table),
                first_page=case.layer * case.num_pages,
                scoring=Scoring(np.float32(0.3)),
            )

        got = np.asarray(traced(shape, 8, attend)(vllm_shaped(case.table, 3)))[: len(case.q)]
        np.testing.assert_allclose(got, dense_answer(case, scale=0.3), atol=3e-5)


def test_a_table_of_the_metadata_passes_through_jit():
    table = make_case(0, kv_len=[9], query_len=[2], tokens_per_page=8, layers=1).table
    shape = PlanShape(4, 2, 2 * MAX_PAGES)
    packed = traced(shape, 8, lambda each: each)(vllm_shaped(table, 1))
    assert packed.shape == shape
    jax.tree.map(np.testing.assert_array_equal, jax.jit(packed_rows)(packed), AiterProvider().plan(table, shape))


def test_a_provider_that_plans_on_the_host_says_so():
    needs = KernelNeeds("cuda", "float16", num_heads=4, num_kv_heads=2, head_dim=64, tokens_per_page=8)
    table = make_case(0, kv_len=[9], query_len=[2], tokens_per_page=8, layers=1).table
    plan = traced(PlanShape(4, 2, 10), 8, lambda packed: foreign_plan(FlashInferProvider(needs), packed))
    with pytest.raises(ForeignPlanError, match="provider 'flashinfer' makes no plan inside a jitted step"):
        plan(vllm_shaped(table, 1))


@pytest.mark.parametrize(
    ("rows", "shape", "message"),
    [
        (3, PlanShape(4, 2, 10), "3 rows of up to 5 pages do not fit a shape of 2 rows and 10 page entries"),
        (2, PlanShape(4, 3, 14), "a shape of 3 rows and 14 page entries: it needs 3 rows and 15 entries"),
    ],
)
def test_a_shape_without_room_is_refused_with_the_numbers(rows, shape, message):
    table = make_case(0, kv_len=[9], query_len=[2], tokens_per_page=8, layers=1).table
    with pytest.raises(ForeignPlanError, match=message):
        foreign_table(vllm_shaped(table, rows), shape, 8)


def test_metadata_that_does_not_fit_together_is_refused():
    metadata = SimpleNamespace(block_tables=np.zeros((2, 3)), seq_lens=np.zeros(2), query_start_loc=np.zeros(2))
    with pytest.raises(ForeignPlanError, match=r"block_tables \[2, 3\], seq_lens \[2\] and query_start_loc \[2\]"):
        foreign_table(metadata, PlanShape(4, 2, 6), 8)
