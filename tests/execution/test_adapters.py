"""LoRA adapters, several in one batch: the tokens of merged weights, whoever runs beside them."""

import jax
import numpy as np
import pytest
from engine_case import GOLDEN, golden_model, golden_prompts, make_engine
from lora_files import write_adapter, write_merged

from benchmarks.compilations import CompilationCounter
from kv_control.prefix_values import MissReason
from kv_execution import AdapterNameError, EngineConfig, NoFreeAdapterSlotError, PagedEngine, SamplingParams
from models import load_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
ROOM = {"max_adapters": 3, "max_adapter_rank": 8}


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    return golden_prompts("llama")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters of the llama: of everything, and of a few projections."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(folder / "all", GOLDEN / "llama", LINEAR, seed=1),
        "few": write_adapter(folder / "few", GOLDEN / "llama", ("q_proj", "down_proj"), seed=2, rank=7),
    }


def adapted_engine(adapters, **settings):
    engine = make_engine(golden_model("llama"), **ROOM, **settings)
    for name in engine.adapters.names:
        engine.adapters.unload(name)
    for name, path in adapters.items():
        engine.adapters.load(name, path)
    return engine


@pytest.mark.parametrize(
    ("provider", "case", "ends"),
    [
        ("reference", "llama", LINEAR),
        ("native", "llama", LINEAR),
        ("native", "phi3", ("qkv_proj", "gate_up_proj", "o_proj")),  # one tensor for several projections
        ("native", "gemma2", ("q_proj", "o_proj", "up_proj", "down_proj")),  # norms behind the products as well
        pytest.param("native", "qwen2", ("k_proj", "gate_proj"), marks=pytest.mark.slow),  # biases
        pytest.param("native", "mixtral", ("v_proj", "o_proj"), marks=pytest.mark.slow),
    ],
)
def test_an_adapter_gives_the_logits_of_merged_weights(provider, case, ends, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / case, ends)
    merged = load_model(write_merged(tmp_path / "merged", GOLDEN / case, adapter, 0.5))
    engine = make_engine(golden_model(case), provider=provider, max_requests=1, max_step_tokens=16, **ROOM)
    engine.adapters.load("it", adapter)
    prompt = golden_prompts(case)[2][:40]
    expected = make_engine(merged, provider=provider, max_requests=1, max_step_tokens=16).score(prompt)
    base = make_engine(golden_model(case), provider=provider, max_requests=1, max_step_tokens=16).score(prompt)
    np.testing.assert_allclose(engine.score(prompt, adapter="it"), expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(engine.score(prompt), base, atol=1e-4, rtol=1e-4)
    assert np.abs(expected - base).max() > 0.1


@pytest.mark.parametrize("provider", [pytest.param("reference", marks=pytest.mark.slow), "native"])
def test_a_batch_of_two_adapters_and_none_gives_each_what_it_gets_alone(provider, prompts, adapters):
    engine = adapted_engine(adapters, provider=provider)
    names = [None, "all", "few", "all"]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True)
    alone = [engine.generate([prompt], params, adapters=name)[0] for prompt, name in zip(prompts, names, strict=True)]
    engine.init_paged_runtime()
    together = engine.generate(prompts, params, adapters=names)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    if provider == "native":  # its bits do not depend on the batch
        assert [result.logprobs for result in together] == [result.logprobs for result in alone]
    plain = make_engine(golden_model("llama"), provider=provider).generate([prompts[0]], GREEDY)[0]
    assert together[0].tokens == plain.tokens
    assert len({engine.generate([prompts[0]], GREEDY, adapters=name)[0].tokens for name in (None, "all", "few")}) == 3


def test_requests_share_pages_only_with_the_same_adapter_whatever_its_name(prompts, adapters, tmp_path):
    copy = write_adapter(tmp_path / "copy", GOLDEN / "llama", LINEAR, seed=1, task_type=None)
    engine = adapted_engine(adapters | {"the same": copy}, provider="native")
    prompt = np.concatenate([prompts[2], prompts[3]])[:40]
    cached = {
        name: engine.generate([prompt], GREEDY, adapters=name)[0].cached_tokens
        for name in ("all", None, "few", "the same")
    }
    assert cached == {"all": 0, None: 0, "few": 0, "the same": 39}
    assert engine.prefix_statistics().misses[MissReason.NAMESPACE] == 2


def test_adapters_come_and_go_while_others_run(prompts, adapters, tmp_path):
    engine = adapted_engine({"first": adapters["all"]}, provider="native")
    expected = {name: engine.generate([prompts[1]], GREEDY, adapters=name)[0].tokens for name in ("first", None)}
    other = {seed: write_adapter(tmp_path / str(seed), GOLDEN / "llama", LINEAR, seed=seed) for seed in range(5, 9)}
    batcher = engine.batcher()
    running = {name: batcher.submit(prompts[1], GREEDY, adapter=name) for name in ("first", None)}
    engine.adapters.unload("first")  # its request goes on, and so does a fork of it
    running["fork"] = batcher.fork(running["first"], GREEDY)
    tokens: dict[int, list[int]] = {request: [] for request in running.values()}
    for path in other.values():
        engine.adapters.load("passing", path)
        late = batcher.submit(prompts[0], SamplingParams(max_tokens=1, ignore_eos=True), adapter="passing")
        tokens[late] = []
        while not tokens[late]:
            for output in batcher.step():
                tokens[output.request_id].append(output.token)
    while batcher.has_unfinished:
        for output in batcher.step():
            tokens[output.request_id].append(output.token)
    assert tuple(tokens[running["first"]]) == tuple(tokens[running["fork"]]) == expected["first"]
    assert tuple(tokens[running[None]]) == expected[None]
    with pytest.raises(AdapterNameError, match="no adapter is called 'first'; loaded are: 'passing'"):
        batcher.submit(prompts[0], GREEDY, adapter="first")


def test_loading_an_adapter_traces_and_compiles_nothing(prompts, adapters):
    engine = adapted_engine({}, provider="native")
    engine.generate(prompts[:2], GREEDY)
    traces = engine.stats().traces
    with CompilationCounter() as compilations:
        engine.adapters.load("all", adapters["all"])
        engine.generate(prompts[:2], GREEDY, adapters=["all", None])
        engine.adapters.load("few", adapters["few"])
        engine.generate(prompts[:2], GREEDY, adapters=["few", "all"])
    assert engine.stats().traces == traces
    assert compilations.count == 0


def test_a_preempted_request_and_a_held_one_keep_their_adapter(prompts, adapters):
    engine = adapted_engine(adapters, provider="native")
    expected = engine.generate([prompts[2]], GREEDY, adapters="few")[0].tokens
    batcher = engine.batcher()
    request = batcher.submit(prompts[2], GREEDY, adapter="few")
    tokens = []
    for step in range(100):
        if step in (2, 7):
            assert batcher.preempt(request)
        tokens += [output.token for output in batcher.step()]
        if not batcher.has_unfinished:
            break
    assert tuple(tokens) == expected
    held = engine.prefill_paged(prompts[2], GREEDY, adapter="few")
    tokens = [held.token]
    while step := engine.generate_paged():
        tokens.append(step[held.handle].token)
    engine.release(held.handle)
    assert tuple(tokens) == expected


@pytest.mark.skipif(jax.device_count() < 4, reason="one device")
@pytest.mark.parametrize("width", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_adapters_over_several_devices_give_the_same_tokens(width, prompts, adapters):
    names = [None, "all", "few"]
    expected = adapted_engine(adapters, provider="native").generate(prompts[:3], GREEDY, adapters=names)
    engine = PagedEngine(
        load_model(GOLDEN / "llama", tensor_parallel=width),
        EngineConfig(max_requests=4, max_step_tokens=64, max_context=128, kv_pool_bytes=1 << 20, **ROOM),
    )
    engine.init_paged_runtime()
    for name, path in adapters.items():
        engine.adapters.load(name, path)
    got = engine.generate(prompts[:3], GREEDY, adapters=names)
    assert [result.tokens for result in got] == [result.tokens for result in expected]


def test_an_engine_without_adapters_has_the_program_it_had(prompts):
    engine = make_engine(golden_model("llama"))
    inputs = engine._runtime._inputs.of(None, engine.describe().shapes[0])
    assert inputs.adapter_slots is None
    assert engine._params is golden_model("llama").params


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(prompts, adapters, tmp_path):
    engine = adapted_engine(adapters)
    with pytest.raises(AdapterNameError, match=r"no room for adapter 'all': make the engine with EngineConfig"):
        make_engine(golden_model("llama")).adapters.load("all", adapters["all"])
    with pytest.raises(AdapterNameError, match="no adapter is called 'none'; loaded are: 'all', 'few'"):
        engine.generate([prompts[0]], GREEDY, adapters="none")
    wide = write_adapter(tmp_path / "wide", GOLDEN / "llama", LINEAR, rank=9)
    with pytest.raises(Exception, match="rank 9 and there is room for 8: raise max_adapter_rank"):
        engine.adapters.load("wide", wide)
    third, fourth = (write_adapter(tmp_path / str(seed), GOLDEN / "llama", LINEAR, seed=seed) for seed in (3, 4))
    engine.adapters.load("third", third)
    with pytest.raises(NoFreeAdapterSlotError, match="all 3 adapter slots are taken, none for 'fourth': unload one"):
        engine.adapters.load("fourth", fourth)
    request = engine.batcher().submit(prompts[0], GREEDY, adapter="third")
    engine.adapters.unload("third")
    with pytest.raises(NoFreeAdapterSlotError):  # its request has not ended
        engine.adapters.load("fourth", fourth)
    engine.batcher().abort(request)
    engine.adapters.load("fourth", fourth)
    assert engine.adapters.names == ("all", "few", "fourth")
