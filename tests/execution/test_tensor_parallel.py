"""A model spread over devices yields the tokens that it yields on one, whatever else is switched on."""

import functools
import itertools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_case import GOLDEN, golden_prompts, make_engine
from jax.sharding import Mesh

from benchmarks.random_llama import write_random_llama
from kv_execution import EngineConfig, PagedEngine, SamplingParams, planning, pools
from kv_kernels.reference import ReferenceProvider
from kv_kernels.selection import choose_provider
from kv_kernels.tensor_parallel import KV_HEAD_REPLICA, KV_HEAD_SHARD, TensorParallelError
from models import LoadedModel, load_model

ONE_ROW = {"provider": "native", "max_requests": 1, "max_step_tokens": 16, "max_context": 64}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
WIDTHS, KV_HEADS = (2, 4, 8), (8, 4, 2, 1)
# More heads than devices, as many, and fewer; the other combinations are slow tests. The reference, which is slow to
# compile, runs where one head is on all devices.
DEFAULT = {
    "native": {(2, 8), (2, 1), (4, 4), (4, 2), (8, 8), (8, 1)},
    "reference": {(8, 1)},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Directories of two-layer models with 8 query heads, by their K/V heads."""
    root = tmp_path_factory.mktemp("heads")

    @functools.cache
    def write(kv_heads: int) -> Path:
        return write_random_llama(
            root / str(kv_heads), layers=2, num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=8
        )

    return write


def prompts() -> list[np.ndarray]:
    """One of a chunk, two of several chunks that begin alike, and one more."""
    rng = np.random.default_rng(0)
    long = rng.integers(0, 96, 37)
    return [rng.integers(0, 96, 5), long, np.append(long[:33], rng.integers(0, 96, 4)), rng.integers(0, 96, 30)]


@functools.cache
def tokens_on_one_device(directory: Path) -> list[tuple[int, ...]]:
    """Every prompt alone, nothing cached."""
    engine = make_engine(load_model(directory), **ONE_ROW, prefix_cache=False)
    return [engine.generate([prompt], GREEDY)[0].tokens for prompt in prompts()]


def run_with_preemptions(engine: PagedEngine) -> list[tuple[int, ...]]:
    """Tokens of every prompt, two at a time, where whoever runs longest is sent back to the queue now and then."""
    batcher = engine.batcher()
    tokens = {batcher.submit(prompt, GREEDY): [] for prompt in prompts()}
    for number in itertools.count():
        if number in (5, 12, 20):
            assert any(batcher.preempt(request) for request in tokens)
        for output in batcher.step():
            tokens[output.request_id].append(output.token)
        if not batcher.has_unfinished:
            return [tuple(each) for each in tokens.values()]


COMBINATIONS = [
    pytest.param(
        *(provider, width, kv_heads),
        marks=() if (width, kv_heads) in DEFAULT[provider] else pytest.mark.slow,
    )
    for provider in ("native", "reference")
    for width in WIDTHS
    for kv_heads in KV_HEADS
]


@pytest.mark.parametrize(("provider", "width", "kv_heads"), COMBINATIONS)
def test_any_width_yields_the_tokens_of_one_device(provider, width, kv_heads, checkpoint):
    model = load_model(checkpoint(kv_heads), tensor_parallel=width)
    engine = make_engine(
        model,
        provider=provider,
        tensor_parallel=width,
        max_requests=2,
        max_step_tokens=16,
        max_context=64,
        tokens_per_page=8,
        pages=12,
        debug=True,
    )
    assert run_with_preemptions(engine) == tokens_on_one_device(checkpoint(kv_heads))
    # Every prompt but one is longer than a step, so there were chunks; and two of them begin alike.
    assert engine.prefix_statistics().hit_tokens > 0

    layout, pools = engine.describe().layout, engine._runtime.state.pools
    assert layout.kv_head_shards == width
    for pool in pools:
        assert len(pool.addressable_shards) == width
        assert {shard.data.shape for shard in pool.addressable_shards} == {layout.pool_shape_per_shard}
    stored = sum(shard.data.nbytes for pool in pools for shard in pool.addressable_shards)
    assert stored == layout.total_pool_bytes


def test_biases_and_a_tied_embedding_are_added_and_read_once():
    prompt, tokens = golden_prompts("llama_bias_tied")[1], {}
    for width in (1, 2, 4):
        engine = make_engine(load_model(GOLDEN / "llama_bias_tied", tensor_parallel=width), **ONE_ROW)
        tokens[width] = engine.generate([prompt], GREEDY)[0].tokens
    assert tokens[2] == tokens[1]
    assert tokens[4] == tokens[1]


def test_a_vocabulary_that_the_devices_do_not_divide_is_multiplied_whole(tmp_path):
    directory, tokens = write_random_llama(tmp_path, layers=1, vocab_size=97), {}
    for width in (1, 2):
        engine = make_engine(load_model(directory, tensor_parallel=width), **ONE_ROW)
        tokens[width] = engine.generate([np.arange(7)], GREEDY)[0].tokens
    assert tokens[2] == tokens[1]


def test_sampling_draws_the_same_on_spread_logits(checkpoint):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, top_k=40, top_p=0.95, seed=5)
    tokens = []
    for width in (1, 4):
        engine = make_engine(load_model(checkpoint(2), tensor_parallel=width), **ONE_ROW)
        tokens.append(engine.generate(prompts()[:1], params)[0].tokens)
    assert tokens[0] == tokens[1]


def test_scores_are_those_of_one_device(checkpoint):
    prompt = prompts()[1]
    scores = [
        make_engine(load_model(checkpoint(2), tensor_parallel=width), **ONE_ROW).score(prompt) for width in (1, 4)
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-5)


@pytest.mark.parametrize("make_mesh", [Mesh, jax.make_mesh], ids=["automatic axes", "explicit axes"])
def test_a_mesh_may_have_more_axes(make_mesh, checkpoint):
    names = ("data", KV_HEAD_SHARD, "expert", KV_HEAD_REPLICA)
    shape = (2, 2, 1, 2)
    mesh = (
        make_mesh(shape, names) if make_mesh is jax.make_mesh else Mesh(np.array(jax.devices()).reshape(shape), names)
    )
    engine = make_engine(load_model(checkpoint(2), tensor_parallel=mesh), **ONE_ROW, debug=True)
    pointers = pointers_of(engine)
    tokens = [engine.generate([prompt], GREEDY)[0].tokens for prompt in prompts()[:2]]
    assert tokens == tokens_on_one_device(checkpoint(2))[:2]
    assert engine.describe().layout.kv_head_shards == 4
    assert pointers_of(engine) == pointers
    assert len(set(pointers)) == 16, "eight devices hold their own K and V"


@pytest.mark.parametrize("provider", ["native", "reference"])
def test_every_device_keeps_its_buffers(provider, checkpoint):
    engine = make_engine(load_model(checkpoint(2), tensor_parallel=4), **{**ONE_ROW, "provider": provider}, debug=True)
    before = pointers_of(engine)
    sharding = engine._runtime.state.pools.k.sharding
    engine.generate(prompts()[:2], GREEDY)
    assert pointers_of(engine) == before
    assert engine._runtime.state.pools.k.sharding == sharding


@pytest.mark.parametrize("kv_heads", [8, 2], ids=["partitioned", "replicated"])
def test_pools_are_made_slice_by_slice_and_never_whole(kv_heads, checkpoint, monkeypatch):
    model, modules, jit = load_model(checkpoint(kv_heads), tensor_parallel=4), [], jax.jit

    def watched(function, **options):
        jitted = jit(function, **options)
        modules.append(jitted.lower().compile().as_text())
        return jitted

    layout = make_engine(model, **ONE_ROW).describe().layout
    monkeypatch.setattr(pools.jax, "jit", watched)
    made = pools.allocate_pools(layout, ReferenceProvider(), model.tensor_mesh)
    (module,) = modules
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", module)}
    assert shapes == {layout.pool_shape_per_shard}
    assert made.k.shape != layout.pool_shape_per_shard


def test_after_warm_up_nothing_compiles_over_devices(checkpoint, caplog):
    engine = make_engine(load_model(checkpoint(2), tensor_parallel=2), **ONE_ROW)
    engine.warmup_paged()
    traces = engine.stats().traces
    with jax.log_compiles(), caplog.at_level("WARNING"):
        engine.generate(prompts(), GREEDY)
    assert engine.stats().traces == traces
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []


def pointers_of(engine: PagedEngine) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer() for pool in engine._runtime.state.pools for shard in pool.addressable_shards
    ]


REFUSALS = [
    ({"kv_heads": 4}, 3, "4 K/V heads cannot spread over 3 devices: choose a divisor or a multiple of 4"),
    ({"kv_heads": 1}, 3, "8 query heads cannot spread over 3 devices: choose a tensor_parallel that divides them"),
    ({"kv_heads": 1}, 16, "8 query heads cannot spread"),
    ({"kv_heads": 4}, 0, "tensor_parallel is 0; give a whole number of at least 1"),
    ({"kv_heads": 4}, "2", "tensor_parallel is '2'; give a whole number"),
]


@pytest.mark.parametrize(("heads", "width", "message"), REFUSALS)
def test_a_width_that_does_not_fit_is_refused_with_the_numbers(heads, width, message, checkpoint, monkeypatch):
    many = [*jax.devices()] * 2
    monkeypatch.setattr(jax, "devices", lambda: many)
    with pytest.raises(TensorParallelError, match=message) as caught:
        load_model(checkpoint(heads["kv_heads"]), tensor_parallel=width)
    assert "\n" not in str(caught.value)


def test_an_mlp_that_does_not_divide_is_refused(tmp_path):
    directory = write_random_llama(
        tmp_path, layers=1, hidden=20, num_attention_heads=16, num_key_value_heads=1, head_dim=8
    )
    with pytest.raises(TensorParallelError, match="40 features of the MLP cannot spread over 16 devices"):
        load_model(
            directory,
            tensor_parallel=Mesh(np.array([*jax.devices()] * 2).reshape(1, 16), (KV_HEAD_SHARD, KV_HEAD_REPLICA)),
        )


def test_more_devices_than_there_are_are_refused_with_the_way_to_have_them(checkpoint):
    with pytest.raises(TensorParallelError) as caught:
        load_model(checkpoint(8), tensor_parallel=16)
    assert str(caught.value) == (
        "tensor_parallel 16 needs 16 devices, this machine shows 8: lower it, or set "
        "XLA_FLAGS=--xla_force_host_platform_device_count=16 to divide this CPU"
    )


def test_a_mesh_without_the_axes_or_in_another_shape_is_refused(checkpoint):
    with pytest.raises(TensorParallelError, match="has the axes model and lacks kv_head_shard and kv_head_replica"):
        load_model(checkpoint(8), tensor_parallel=Mesh(np.array(jax.devices()), ("model",)))
    wrong = Mesh(np.array(jax.devices()).reshape(8, 1), (KV_HEAD_SHARD, KV_HEAD_REPLICA))
    with pytest.raises(
        TensorParallelError, match="8 shards of 1 replicas, but 2 K/V heads on 8 devices are 2 shards of 4"
    ):
        load_model(checkpoint(2), tensor_parallel=wrong)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_an_engine_spreads_a_model_that_is_on_one_device(kv_heads, checkpoint):
    model = load_model(checkpoint(kv_heads))
    paged = make_engine(model, **ONE_ROW, tensor_parallel=2)
    assert paged.describe().layout.kv_head_shards == 2
    assert paged.generate([prompts()[0]], GREEDY)[0].tokens == tokens_on_one_device(checkpoint(kv_heads))[0]
    assert model.tensor_mesh is None


def test_a_spread_model_is_the_one_that_was_loaded_so(checkpoint):
    spread, loaded = load_model(checkpoint(2)).spread(4), load_model(checkpoint(2), tensor_parallel=4)
    assert spread.fingerprint == loaded.fingerprint
    for ours, theirs in zip(jax.tree.leaves(spread.params), jax.tree.leaves(loaded.params), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


def test_a_spread_model_is_not_spread_again(checkpoint):
    with pytest.raises(TensorParallelError, match="spread over 2 devices already: load it anew"):
        PagedEngine(load_model(checkpoint(2), tensor_parallel=2), EngineConfig(tensor_parallel=4))


def test_each_rank_holds_the_query_heads_of_its_own_kv_head(checkpoint):
    whole: LoadedModel = load_model(checkpoint(2))
    spread: LoadedModel = load_model(checkpoint(2), tensor_parallel=8)
    attention = {
        name: tree["layers"]["attention"] for name, tree in (("whole", whole.params), ("spread", spread.params))
    }
    q, k = (np.asarray(attention["whole"][name]["weight"].values) for name in "qk")
    for name, matrix, heads_each, head_of in (("q", q, 1, lambda rank: rank), ("k", k, 1, lambda rank: rank // 4)):
        shards = {s.device: s.data for s in attention["spread"][name]["weight"].values.addressable_shards}
        for rank, device in enumerate(jax.devices()):
            first = head_of(rank) * 8
            np.testing.assert_array_equal(shards[device], matrix[:, first : first + 8 * heads_each])


def test_a_provider_is_asked_about_the_heads_of_one_device(checkpoint, monkeypatch):
    asked = []

    def choose(needs, requested):
        asked.append(needs)
        return choose_provider(needs, requested)

    monkeypatch.setattr(planning, "choose_provider", choose)
    PagedEngine(load_model(checkpoint(2), tensor_parallel=8), EngineConfig())
    assert [(needs.num_heads, needs.num_kv_heads) for needs in asked] == [(1, 1)]


@pytest.mark.slow
def test_the_real_model_spread_over_three_devices_says_the_same(smollm2_gguf):
    tokens, whole = {}, load_model(smollm2_gguf)
    for width in (1, 3):
        model = load_model(smollm2_gguf, tensor_parallel=width)
        assert model.fingerprint == whole.spread(width).fingerprint
        prompt = model.tokenizer.encode("The three primary colors are")
        paged = make_engine(model, **{**ONE_ROW, "kv_pool_bytes": 64 << 20})
        tokens[width] = paged.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))[0].tokens
    assert tokens[3] == tokens[1]
