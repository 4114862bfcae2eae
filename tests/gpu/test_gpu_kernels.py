"""Every provider of a GPU against the reference, on the GPU: `JAX_PLATFORMS=cuda python -m pytest -m gpu tests/gpu`.

A provider's name in `PROVIDERS` is all that it takes to be tested here; what a provider says it lacks is skipped.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_execution import SamplingParams
from kv_kernels.experts import Experts, Routing, expert_mlp, route
from kv_kernels.provider import KernelNeeds, KernelProvider, PlanShape, PoolPair, Scoring
from kv_kernels.reference import ReferenceProvider
from kv_kernels.selection import ProviderError, choose_provider, current_platform
from kv_kernels.weights import BlockQuantWeight, DenseWeight, StoredWeight
from tests.execution.engine_case import golden_model, golden_prompts, make_engine
from tests.kernels import paged_case
from tests.kernels.paged_case import PagedCase, make_case

pytestmark = pytest.mark.gpu

PROVIDERS = ("pallas", "flashinfer", "aiter")
BOUNDS = {"float32": 5e-5, "bfloat16": 3e-2, "float16": 4e-3}


def plan_shape(case: PagedCase, **padded: int) -> PlanShape:
    """The case's shape, with as many page entries as an engine has: every row at the length of the longest."""
    shape = paged_case.plan_shape(case, **padded)
    return shape._replace(page_entries=shape.rows * int(np.diff(case.table.page_indptr).max()))


@pytest.fixture(scope="module")
def platform() -> str:
    found = current_platform()
    if found not in ("cuda", "rocm"):
        pytest.skip(f"jax runs on {found}: no GPU, or its plugin is not installed, or JAX_PLATFORMS names another")
    return found


@pytest.fixture(scope="module", params=PROVIDERS)
def name(request, platform) -> str:
    return request.param


def provider_for(name: str, case: PagedCase, scoring: Scoring) -> KernelProvider:
    """The provider, or a skip with what it lacks."""
    _, tokens_per_page, kv_heads, head_dim = case.pools.k.shape
    shape = {"num_heads": case.q.shape[1], "num_kv_heads": kv_heads, "head_dim": head_dim}
    needs = KernelNeeds(current_platform(), str(case.pools.k.dtype), tokens_per_page=tokens_per_page, **shape)
    try:
        return choose_provider(
            KernelNeeds(**{**vars(needs), "window": scoring.window, "soft_cap": scoring.soft_cap}), name
        ).provider
    except ProviderError as error:
        pytest.skip(str(error))


def attend(provider: KernelProvider, case: PagedCase, shape, scoring: Scoring) -> np.ndarray:
    q = np.ones((shape.tokens, *case.q.shape[1:]), np.float32)
    q[: len(case.q)] = case.q
    # The reference would take TF32 on a GPU.
    with jax.default_matmul_precision("highest"):
        out = jax.jit(provider.paged_attention, static_argnames="scoring")(
            jnp.asarray(q, case.pools.k.dtype),
            case.pools,
            provider.plan(case.table, shape),
            first_page=np.int32(case.layer * case.num_pages),
            scoring=scoring,
        )
    return np.asarray(out.astype(jnp.float32))[: len(case.q)]


def check(name: str, case: PagedCase, shape=None, *, scale=0.1, window=None, soft_cap=None) -> None:
    scoring = Scoring(np.float32(scale), window, soft_cap)
    shape = shape or plan_shape(case)
    got = attend(provider_for(name, case, scoring), case, shape, scoring)
    wanted = attend(ReferenceProvider(), case, shape, scoring)
    np.testing.assert_allclose(got, wanted, atol=BOUNDS[str(case.pools.k.dtype)])


@st.composite
def ragged_lengths(draw):
    kv_len = draw(st.lists(st.integers(1, 900), min_size=1, max_size=6))
    query_len = [draw(st.one_of(st.just(1), st.integers(1, total))) for total in kv_len]
    return kv_len, [1] * len(kv_len) if draw(st.booleans()) else query_len


@settings(max_examples=60)
@given(
    lengths=ragged_lengths(),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    tokens_per_page=st.sampled_from([1, 3, 16, 64, 128]),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.integers(1, 16),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    window=st.sampled_from([None, 1, 7, 130]),
    soft_cap=st.sampled_from([None, 30.0]),
    padding=st.integers(0, 9),
)
def test_every_ragged_mixture_equals_the_reference(
    name, lengths, seed, dtype, tokens_per_page, kv_heads, group, head_dim, window, soft_cap, padding
):
    kv_len, query_len = lengths
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim, "layers": 1}
    case = make_case(seed, kv_len=kv_len, query_len=query_len, tokens_per_page=tokens_per_page, dtype=dtype, **sizes)
    tokens = case.table.tokens + padding
    rows = tokens if max(query_len) == 1 else case.table.rows + padding
    check(name, case, plan_shape(case, tokens=tokens, rows=rows), window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kv_len", "query_len"),
    [([1500], [1500]), ([6000, 40, 3000], [1, 1, 1]), ([2000, 3000, 700], [500, 1, 1])],
    ids=["prefill", "decode", "chunk and decodes"],
)
def test_the_sizes_of_a_real_model_equal_the_reference(name, kv_len, query_len, dtype):
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 1}
    check(name, make_case(1, kv_len=kv_len, query_len=query_len, dtype=dtype, **sizes))


@pytest.mark.parametrize("query_len", [[1, 2, 16, 1, 4], [1] * 5], ids=["mixture", "decode"])
def test_what_no_row_holds_cannot_reach_the_output_even_as_nan(name, query_len):
    lengths = {"kv_len": [1, 15, 16, 17, 133], "query_len": query_len, "head_dim": 64, "dtype": "bfloat16"}
    quiet, loud = make_case(3, **lengths, fill=0.0), make_case(3, **lengths, fill=np.nan)
    scoring = Scoring(np.float32(0.125))
    provider = provider_for(name, quiet, scoring)
    outputs = [attend(provider, case, plan_shape(case), scoring) for case in (quiet, loud)]
    np.testing.assert_array_equal(*outputs)


def test_append_writes_its_slots_in_place_and_nothing_else(name):
    case = make_case(2, kv_len=[20, 9], query_len=[1, 1], heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", fill=0.0)
    provider = provider_for(name, case, Scoring(np.float32(1)))
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.standard_normal((5, 2, 64)), jnp.bfloat16)
    slots = jnp.asarray([9, -1, 22, case.pools.k.shape[0] * 16, 35], jnp.int32)
    wanted = ReferenceProvider().append_kv(new, -new, slots, case.pools)
    pools = jax.tree.map(jnp.copy, case.pools)
    pointers = [pool.unsafe_buffer_pointer() for pool in pools]
    got = jax.jit(provider.append_kv, donate_argnums=3)(new, -new, slots, pools)
    assert [pool.unsafe_buffer_pointer() for pool in got] == pointers
    for pool, expected in zip(got, wanted, strict=True):
        # Page 0 is for padding: what is to be written nowhere may go there.
        np.testing.assert_array_equal(pool[1:].astype(jnp.float32), expected[1:].astype(jnp.float32))


def test_a_loop_over_layers_copies_no_pool(name):
    case = make_case(2, kv_len=[20, 9], query_len=[1, 1], heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", fill=0.0)
    scoring = Scoring(np.float32(1))
    provider = provider_for(name, case, scoring)
    # Far larger than anything else, so that a copy of it cannot hide.
    pools = PoolPair(
        *(jnp.concatenate([pool, jnp.zeros((1 << 18, *pool.shape[1:]), pool.dtype)]) for pool in case.pools)
    )
    plan = provider.plan(case.table, plan_shape(case))
    k_new = jnp.ones((2, 2, 64), jnp.bfloat16)

    def step(pools, q, slots):
        def layer(index, carry):
            pools, out = carry
            pools = provider.append_kv(k_new, k_new, slots + index * case.num_pages * 16, pools)
            first_page = index * case.num_pages
            return pools, out + provider.paged_attention(q, pools, plan, first_page=first_page, scoring=scoring)

        return jax.lax.fori_loop(0, 2, layer, (pools, q))

    arguments = (pools, jnp.asarray(case.q, jnp.bfloat16), case.table.write_slots)
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools.k.nbytes // 4


def test_a_pool_of_more_than_four_gigabytes_is_reached_to_its_end(name):
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 24 << 30:
        pytest.skip(f"needs 24 GiB of device memory, jax may use {limit} bytes")
    case = make_case(1, kv_len=[300, 70], query_len=[1, 70], heads=8, kv_heads=8, head_dim=128, dtype="bfloat16")
    spare = 1 << 17  # of 32 KiB each in K and in V: offsets of the case's own pages need more than 32 bits
    far = PoolPair(
        *(jnp.concatenate([jnp.full((spare, *pool.shape[1:]), jnp.nan, pool.dtype), pool]) for pool in case.pools)
    )
    scoring = Scoring(np.float32(0.1))
    provider = provider_for(name, case, scoring)
    shape = plan_shape(case)
    case_far = case._replace(pools=far, num_pages=1, layer=spare + case.layer * case.num_pages)
    np.testing.assert_array_equal(attend(provider, case_far, shape, scoring), attend(provider, case, shape, scoring))
    slots = jnp.asarray([far.k.shape[0] * 16 - 1], jnp.int32)
    after = jax.jit(provider.append_kv, donate_argnums=3)(*(jnp.ones((1, 8, 128), jnp.bfloat16),) * 2, slots, far)
    assert np.asarray(after.v[-1, -1].astype(jnp.float32)).min() == 1


def test_the_scale_reaches_the_scores_once(name):
    case = make_case(4, kv_len=[300, 20, 9], query_len=[1, 17, 1], head_dim=64, dtype="bfloat16")
    shape, quarter, one = plan_shape(case), Scoring(np.float32(0.25)), Scoring(np.float32(1))
    provider = provider_for(name, case, quarter)
    before = case._replace(q=case.q * np.float32(0.25))  # exact in bfloat16
    np.testing.assert_allclose(attend(provider, before, shape, one), attend(provider, case, shape, quarter), atol=1e-2)


def expert_stack(seed: int, kind: str, *shape: int) -> StoredWeight:
    """Experts [layers, experts, out, in], in a dtype or quantized."""
    rng = np.random.default_rng(seed)
    if kind in BOUNDS:
        return DenseWeight(jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5, kind))
    blocks = (*shape[:-1], shape[-1] // 32)
    if kind == "q8_0":
        scales = jnp.asarray(rng.uniform(0.0002, 0.0008, blocks), jnp.float16)
        return BlockQuantWeight(jnp.asarray(rng.integers(-128, 128, shape, np.int8)), scales, None, "q8_0")
    quants = jnp.asarray(rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8))
    scales, mins = (jnp.asarray(rng.uniform(*each, blocks), jnp.float16) for each in ((0.002, 0.01), (-0.08, -0.01)))
    return BlockQuantWeight(quants, scales, mins, "q4_1")


def mixture(kind: str, hidden: int, inner: int, layers: int = 2, experts: int = 8) -> Experts:
    wide, narrow = (layers, experts, inner, hidden), (layers, experts, hidden, inner)
    return Experts(*(expert_stack(seed, kind, *at) for seed, at in enumerate((wide, wide, narrow))), "silu")


def routed(tokens: int, hidden: int, dtype: str, experts: int = 8) -> tuple[jax.Array, Routing]:
    rng = np.random.default_rng(tokens)
    logits = jnp.asarray(rng.standard_normal((tokens, experts)), jnp.float32)
    return jnp.asarray(rng.standard_normal((tokens, hidden)), dtype), route(logits, 2, renormalize=True)


def provider_of_experts(name: str) -> KernelProvider:
    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "tokens_per_page": 16}
    try:
        return choose_provider(KernelNeeds(current_platform(), "bfloat16", **sizes), name).provider
    except ProviderError as error:
        pytest.skip(str(error))


def compute_experts(provider: KernelProvider, x: jax.Array, routing: Routing, experts: Experts, layer: int):
    def run(x: jax.Array, routing: Routing, weights: tuple[StoredWeight, ...], layer: jax.Array) -> jax.Array:
        return expert_mlp(provider, x, routing, Experts(*weights, experts.activation), layer)

    return np.asarray(jax.jit(run)(x, routing, tuple(experts[:3]), jnp.int32(layer)))


@pytest.mark.parametrize("tokens", [1, 33, 500])
@pytest.mark.parametrize(
    ("dtype", "kind", "hidden", "inner"),
    [
        *((dtype, dtype, 1024, 768) for dtype in BOUNDS),
        ("float32", "float32", 200, 72),
        *((dtype, kind, 1024, 768) for kind in ("q8_0", "q4_1") for dtype in ("float32", "bfloat16")),
    ],
)
def test_experts_equal_the_reference(name, dtype, kind, hidden, inner, tokens):
    experts, (x, routing) = mixture(kind, hidden, inner), routed(tokens, hidden, dtype)
    got, wanted = (
        compute_experts(each, x, routing, experts, 1) for each in (provider_of_experts(name), ReferenceProvider())
    )
    np.testing.assert_allclose(got, wanted, atol=BOUNDS[dtype] * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_what_experts_make_of_a_token_has_the_same_bits_in_any_batch(name, dtype):
    experts, (x, routing) = mixture(dtype, 1024, 768), routed(500, 1024, dtype)
    provider = provider_of_experts(name)
    whole = compute_experts(provider, x, routing, experts, 0)
    for some in (slice(0, 1), slice(499, 500), slice(100, 109), slice(7, 200)):
        its = Routing(*(each[some] for each in routing))
        np.testing.assert_array_equal(compute_experts(provider, x[some], its, experts, 0), whole[some])


def test_experts_beyond_four_gigabytes_are_reached(name):
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 24 << 30:
        pytest.skip(f"needs 24 GiB of device memory, jax may use {limit} bytes")
    experts, (x, routing) = mixture("bfloat16", 1024, 768, layers=1), routed(33, 1024, "bfloat16")
    spare = 400  # layers, of 12 MiB in each stack
    far = (
        DenseWeight(jnp.concatenate([jnp.full((spare, *each.values.shape[1:]), jnp.nan, "bfloat16"), each.values]))
        for each in experts[:3]
    )
    provider = provider_of_experts(name)
    got = compute_experts(provider, x, routing, Experts(*far, experts.activation), spare)
    np.testing.assert_array_equal(got, compute_experts(provider, x, routing, experts, 0))


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_an_engine_yields_the_references_tokens(name, case):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    tokens = {}
    with jax.default_matmul_precision("highest"):
        for each in (name, "reference"):
            try:
                engine = make_engine(golden_model(case), provider=each)
            except ProviderError as error:
                pytest.skip(str(error))
            tokens[each] = [result.tokens for result in engine.generate(golden_prompts(case), params)]
    assert tokens[name] == tokens["reference"]
