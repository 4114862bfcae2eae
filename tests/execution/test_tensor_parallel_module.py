"""What the compiled step of a spread model says to other devices, and when; read off the compiled module."""

import re
from typing import Any, NamedTuple

import pytest
from engine_case import GOLDEN, make_engine
from full_code import full_code

from benchmarks.random_llama import write_random_llama
from kv_control.buckets import StepShape
from kv_execution import PagedEngine
from kv_execution.sampling import GreedyInputs
from models import load_model

LAYERS, HIDDEN, VOCAB, HEAD_DIM, WIDTH = 3, 32, 96, 8, 4
SHAPE = StepShape(16, 2, 256)
COLLECTIVE = re.compile(
    r"= \(?(?P<shape>[a-z0-9]+\[[0-9,]*\])\S* "
    r"(?P<kind>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(-start)?\("
)


class Collective(NamedTuple):
    kind: str
    shape: str
    in_loop: bool


class Module(NamedTuple):
    """The network, and what follows it: logits, or the most likely tokens."""

    text: str
    logits: str
    greedy: str
    memory: Any
    engine: PagedEngine


@pytest.fixture(
    scope="module",
    params=[(provider, kv_heads) for provider in ("native", "reference") for kv_heads in (4, 2)],
    ids=lambda param: f"{param[0]} {param[1]} K/V heads",
)
def module(request, tmp_path_factory) -> Module:
    provider, kv_heads = request.param
    directory = write_random_llama(
        tmp_path_factory.mktemp("module"),
        **{"layers": LAYERS, "hidden": HIDDEN, "vocab_size": VOCAB, "head_dim": HEAD_DIM},
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
    )
    with full_code():  # which instructions there are depends on what becomes of them
        return compiled_step(load_model(directory, tensor_parallel=WIDTH), provider)


def compiled_step(model, provider: str, **settings) -> Module:
    engine = make_engine(
        model, provider=provider, max_requests=2, max_step_tokens=16, max_context=64, kv_pool_bytes=4 << 20, **settings
    )
    runtime = engine._runtime
    inputs = runtime._inputs.of(None, SHAPE)
    lowered = runtime.programs.forward.lower(runtime.params, runtime.state, inputs)
    hidden = lowered.out_info.hidden
    logits = runtime.programs.logits.lower(runtime.params, hidden)
    sampling = runtime._table.padding(SHAPE.rows, GreedyInputs)
    greedy = runtime.programs.greedy.lower(runtime.params, hidden, runtime.state.sampler, sampling)
    compiled = lowered.compile()
    texts = (each.as_text() for each in (compiled, logits.compile(), greedy.compile()))
    return Module(*texts, compiled.memory_analysis(), engine)


def loop_bodies(text: str) -> set[str]:
    return set(re.findall(r" while\(.*body=%?([\w.-]+)", text))


def computations(text: str) -> dict[str, list[str]]:
    """Instruction lines of every computation, in the order in which they run: the module is scheduled."""
    assert "is_scheduled=true" in text.splitlines()[0]
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            lines = found.setdefault(head[1], [])
        elif " = " in line:
            lines.append(line.strip())
    return found


def collectives(text: str) -> list[Collective]:
    bodies = loop_bodies(text)
    return [
        Collective(match["kind"], match["shape"], name in bodies)
        for name, lines in computations(text).items()
        for line in lines
        if (match := COLLECTIVE.search(line))
    ]


def test_two_sums_per_layer_and_the_logits_are_all_that_is_said(module):
    hidden = Collective("all-reduce", f"f32[{SHAPE.tokens},{HIDDEN}]", in_loop=True)
    logits = Collective("all-gather", f"f32[{SHAPE.rows},{VOCAB}]", in_loop=False)
    assert collectives(module.text) == [hidden, hidden]
    assert collectives(module.logits) == collectives(module.greedy) == [logits]


def test_unrolled_there_are_two_sums_for_every_layer():
    model = load_model(GOLDEN / "llama", tensor_parallel=2)
    found = collectives(compiled_step(model, "native", unroll_layers=True).text)
    assert [each.kind for each in found] == ["all-reduce"] * (2 * model.spec.num_layers)


def test_nothing_is_said_between_append_and_attention(module):
    bodies = computations(module.text)
    (body,) = [
        lines
        for name, lines in bodies.items()
        if name in loop_bodies(module.text) and any(map(COLLECTIVE.search, lines))
    ]
    said = [number for number, line in enumerate(body) if COLLECTIVE.search(line)]
    pool = ",".join(map(str, module.engine.describe().layout.pool_shape_per_shard))
    # Whatever makes a new value of a pool appends to it (or clears and copies pages before that).
    writes = [
        number
        for number, line in enumerate(body)
        if f"f32[{pool}]" in line.split("(")[0] and "get-tuple-element(" not in line and " tuple(" not in line
    ] or [number for number, line in enumerate(body) if 'custom_call_target="jaxkv_attend"' in line]
    attention = [
        number
        for number, line in enumerate(body)
        if 'custom_call_target="jaxkv_attend"' in line or (" while(" in line and pool in line)
    ]
    assert writes
    assert attention
    assert max(attention) < min(said), "both sums come after the layer's attention: the first closes it"
    assert min(writes) <= max(attention)  # one and the same where a call does both


def test_no_collective_carries_keys_or_values(module):
    for each in collectives(module.text):
        dimensions = [int(size) for size in re.findall(r"\d+", each.shape.split("[")[1])]
        assert HEAD_DIM not in dimensions[-1:]
        assert len(dimensions) == 2, "K/V has heads"


def test_every_device_gives_its_pools_away_and_gets_them_back(module):
    layout = module.engine.describe().layout
    header = module.text.splitlines()[0]
    aliased = dict(re.findall(r"\{(\d+)\}: \((\d+), \{\}, may-alias\)", header.split("entry_computation_layout")[0]))
    parameters = re.findall(r"[a-z0-9]+\[[0-9,]*\]", header.split("entry_computation_layout={(")[1].split(")->(")[0])
    results = re.findall(r"[a-z0-9]+\[[0-9,]*\]", header.split(")->(")[1].split(")}")[0])
    pool = f"f32[{','.join(map(str, layout.pool_shape_per_shard))}]"
    pools = [number for number, shape in enumerate(results) if shape == pool]
    assert len(pools) == 2
    assert [parameters[int(aliased[str(number)])] for number in pools] == [pool, pool]
    assert module.memory.alias_size_in_bytes >= layout.pool_bytes_per_shard
    assert module.memory.temp_size_in_bytes < layout.pool_bytes_per_shard // 4


def test_a_tied_embedding_is_not_copied_for_the_logits():
    model = load_model(GOLDEN / "llama_bias_tied", tensor_parallel=2)
    text = compiled_step(model, "native").logits
    vocab, hidden = model.spec.vocab_size, 64
    for shape in (f"{vocab},{hidden}", f"2,{vocab // 2},{hidden}", f"{vocab // 2},{hidden}"):
        made = re.findall(rf"= f32\[{shape}\]\S* ([\w-]+)\(", text)
        assert set(made) <= {"parameter", "bitcast", "get-tuple-element"}
    assert Collective("all-gather", f"f32[{SHAPE.rows},{vocab}]", in_loop=False) in collectives(text)
