"""flashinfer and aiter, over stand-ins that run on a CPU, against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import PagedCase, dense_answer, make_case

from kv_kernels.aiter import AiterProvider
from kv_kernels.flashinfer import FlashInferProvider
from kv_kernels.flashinfer.provider import FlashInferError
from kv_kernels.native import NativeProvider
from kv_kernels.packed_rows import pack_rows
from kv_kernels.provider import KernelNeeds, PlanShape, PoolPair, Scoring
from kv_kernels.reference import ReferenceProvider

pytest.importorskip("jax_tvm_ffi", reason="stand-ins are registered through jax-tvm-ffi, which is not installed")

import flashinfer_stand_in
from aiter_stand_in import AiterStandIn
from flashinfer_stand_in import FlashInferStandIn

SMALL = KernelNeeds("cuda", "float16", num_heads=4, num_kv_heads=2, head_dim=8, tokens_per_page=16)
FLASHINFER = FlashInferProvider(SMALL, FlashInferStandIn())
AITER = AiterProvider(AiterStandIn())
MIXED = PlanShape(tokens=24, rows=5, page_entries=30)
EACH_A_ROW = PlanShape(tokens=20, rows=20, page_entries=120)


def sized(provider, case: PagedCase, window: int | None = None, soft_cap: float | None = None):
    """The provider for the case's model, where it depends on one."""
    if provider is not FLASHINFER:
        return provider
    tokens_per_page, kv_heads, head_dim = case.pools.k.shape[1:]
    heads = case.q.shape[1]
    needs = KernelNeeds("cuda", "float16", heads, kv_heads, head_dim, tokens_per_page, window, soft_cap)
    return FlashInferProvider(needs, FLASHINFER.library)


def attend(provider, case: PagedCase, shape: PlanShape, *, scale, window=None, soft_cap=None, dtype="float16"):
    provider = sized(provider, case, window, soft_cap)
    q = np.zeros((shape.tokens, *case.q.shape[1:]), np.float32)
    q[: len(case.q)] = case.q
    scoring = Scoring(np.float32(scale), window, soft_cap)

    @jax.jit
    def run(q, pools, plan, first_page):
        return provider.paged_attention(q, pools, plan, first_page=first_page, scoring=scoring)

    out = run(jnp.asarray(q, dtype), case.pools, provider.plan(case.table, shape), case.layer * case.num_pages)
    assert out.dtype == dtype
    out = np.asarray(out.astype(jnp.float32))
    if provider.name in ("flashinfer", "aiter"):
        # Tokens of padding come out as zeros, whatever a kernel left there.
        assert (out[len(case.q) :] == 0).all()
    return out[: len(case.q)]


@pytest.mark.parametrize("shape", [MIXED, EACH_A_ROW], ids=["mixed", "each token a row"])
@pytest.mark.parametrize("group", [2, 5])  # FlashInfer's decode kernel has no group of 5
@pytest.mark.parametrize(
    ("provider", "window", "soft_cap"),
    [(FLASHINFER, None, None), (FLASHINFER, 7, 1.5), (FLASHINFER, 1, None), (AITER, None, None), (AITER, 7, None)],
    ids=["flashinfer", "flashinfer window cap", "flashinfer window of one", "aiter", "aiter window"],
)
def test_a_ragged_mixture_equals_dense_attention(provider, window, soft_cap, group, shape):
    case = make_case(
        4, kv_len=[70, 5, 33, 16], query_len=[3, 5, 1, 7], heads=2 * group, kv_heads=2, dtype="float16", fill=0.0
    )
    got = attend(provider, case, shape, scale=0.37, window=window, soft_cap=soft_cap)
    np.testing.assert_allclose(got, dense_answer(case, scale=0.37, window=window, soft_cap=soft_cap), atol=4e-3)


@pytest.mark.parametrize("group", [1, 3, 4])  # AITER's decode kernels have no group of 3
@pytest.mark.parametrize("provider", [FLASHINFER, AITER], ids=["flashinfer", "aiter"])
def test_decode_steps_equal_dense_attention(provider, group):
    case = make_case(
        5,
        **{"kv_len": [70, 1, 33, 16], "query_len": [1] * 4, "head_dim": 128, "dtype": "float16", "fill": 0.0},
        heads=2 * group,
        kv_heads=2,
    )
    got = attend(provider, case, PlanShape(8, 8, 48), scale=0.1)
    np.testing.assert_allclose(got, dense_answer(case, scale=0.1), atol=4e-3)


@pytest.mark.parametrize("provider", [ReferenceProvider(), NativeProvider(), FLASHINFER, AITER], ids=lambda p: p.name)
def test_the_scale_is_applied_once(provider):
    case = make_case(6, kv_len=[40, 9], query_len=[2, 9], dtype="float16", fill=0.0)
    for scale in (0.9, 0.05):
        got = attend(provider, case, MIXED, scale=scale)
        np.testing.assert_allclose(got, dense_answer(case, scale=scale), atol=4e-3)


@pytest.mark.parametrize("provider", [FLASHINFER, AITER], ids=["flashinfer", "aiter"])
def test_a_wider_query_is_narrowed_to_the_pools_and_back(provider):
    case = make_case(6, kv_len=[40, 9], query_len=[2, 9], dtype="float16", fill=0.0)
    got = attend(provider, case, MIXED, scale=0.3, dtype="float32")
    np.testing.assert_allclose(got, dense_answer(case, scale=0.3), atol=4e-3)


@pytest.mark.parametrize(("provider", "redirected"), [(FLASHINFER, True), (AITER, False)], ids=["flashinfer", "aiter"])
def test_append_writes_its_slots_and_nothing_but_the_padding_page(provider, redirected):
    pools = PoolPair(*(jnp.zeros((6, 4, 2, 8), "float16") for _ in range(2)))
    new = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 8)), "float32")
    slots = jnp.asarray([9, -1, 24, 22], jnp.int32)  # the second and third are outside
    k, v = jax.jit(provider.append_kv)(new, -new, slots, pools)
    expected = np.zeros((24, 2, 8), np.float16)
    expected[[9, 22]] = new[jnp.asarray([0, 3])]
    if redirected:
        expected[0] = new[2]  # the last of those that are outside
    np.testing.assert_array_equal(k.reshape(24, 2, 8), expected)
    np.testing.assert_array_equal(v.reshape(24, 2, 8), -expected)


def test_the_schedule_is_the_same_for_every_step_of_a_shape_but_for_its_contents():
    first = make_case(1, kv_len=[70, 5], query_len=[3, 5], dtype="float16")
    second = make_case(2, kv_len=[9, 31, 44], query_len=[9, 1, 2], dtype="float16")
    for shape in (MIXED, EACH_A_ROW):
        plans = [sized(FLASHINFER, case).plan(case.table, shape) for case in (first, second)]
        assert plans[0].static == plans[1].static
        assert jax.tree.structure(plans[0]) == jax.tree.structure(plans[1])
        assert jax.tree.map(np.shape, plans[0]) == jax.tree.map(np.shape, plans[1])
    assert not np.array_equal(*(sized(FLASHINFER, case).plan(case.table, MIXED).schedule for case in (first, second)))


def test_rows_packed_elsewhere_are_planned_on_the_host():
    case = make_case(1, kv_len=[70, 5], query_len=[3, 5], dtype="float16")
    provider = sized(FLASHINFER, case)
    plan = provider.plan_rows(jax.tree.map(jnp.asarray, pack_rows(case.table, MIXED)), MIXED)
    jax.tree.map(np.testing.assert_array_equal, plan, provider.plan(case.table, MIXED))


def test_layers_that_differ_from_the_plan_are_refused():
    case = make_case(1, kv_len=[70, 5], query_len=[3, 5], dtype="float16")
    provider = sized(FLASHINFER, case, window=8)
    with pytest.raises(FlashInferError, match="a layer has window None and soft cap None, but its step is planned"):
        provider.paged_attention(
            jnp.asarray(case.q),
            case.pools,
            provider.plan(case.table, MIXED),
            first_page=0,
            scoring=Scoring(np.float32(1)),
        )


def test_aiter_refuses_a_soft_cap_that_its_kernels_would_ignore():
    case = make_case(1, kv_len=[70, 5], query_len=[3, 5], dtype="float16")
    with pytest.raises(ValueError, match=r"aiter has no soft cap, and a layer asks for one of 1\.5"):
        attend(AITER, case, MIXED, scale=1, soft_cap=1.5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shape"),
    [(32, 8, PlanShape(2048, 64, 64 * 256)), (64, 8, PlanShape(16, 8, 512)), (8, 1, PlanShape(4, 2, 32))],
    ids=["a long prefill", "a wide group", "one K/V head"],
)
def test_workspaces_hold_what_the_vendor_allocates_on_the_largest_gpu(monkeypatch, heads, kv_heads, shape):
    # The stand-in allocates as the vendor does, and refuses what does not fit; here with the largest tiles and GPU.
    monkeypatch.setattr(flashinfer_stand_in, "TILE", 128)
    monkeypatch.setattr(flashinfer_stand_in, "MIN_ITEMS", 2 * 192 // kv_heads)
    needs = KernelNeeds("cuda", "float16", heads, kv_heads, head_dim=128, tokens_per_page=16)
    case = make_case(0, kv_len=[3, 2], query_len=[2, 1], dtype="float16")
    plan = FlashInferProvider(needs, FlashInferStandIn()).plan(case.table, shape)
    assert plan.static.scratch_bytes >= 128 << 20
    monkeypatch.setattr(flashinfer_stand_in, "TILE", 16)
    FlashInferProvider(needs, FlashInferStandIn()).plan(case.table, shape)
