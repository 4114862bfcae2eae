"""The pools are donated, updated in place, and never copied, at any depth."""

import re

import jax
import numpy as np
import pytest
from engine_case import golden_model, make_engine

from benchmarks.random_llama import write_random_llama
from kv_control.buckets import StepShape
from kv_execution import PagedEngine, SamplingParams
from models import load_model

SHAPES = (StepShape(1, 1, 128), StepShape(4, 4, 128), StepShape(64, 4, 128))


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 30])
def deep_engine(request, tmp_path_factory) -> PagedEngine:
    directory = write_random_llama(tmp_path_factory.mktemp(f"layers{request.param}"), layers=request.param)
    # A pool far larger than anything else in the step, so that a copy of it cannot hide.
    return make_engine(load_model(directory), kv_pool_bytes=64 << 20, provider="reference")


def compiled_step(engine: PagedEngine, shape: StepShape) -> jax.stages.Compiled:
    runtime = engine._runtime
    inputs = runtime._inputs.of(None, shape)
    return runtime.programs.forward.lower(engine.model.params, runtime.state, inputs).compile()


def test_buffer_pointers_stay_the_same_over_a_hundred_steps(deep_engine):
    deep_engine.init_paged_runtime()
    runtime = deep_engine._runtime
    pointers = [pool.unsafe_buffer_pointer() for pool in runtime.state.pools]
    history = runtime.state.sampler.history.unsafe_buffer_pointer()
    deep_engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=105, ignore_eos=True))
    assert deep_engine.stats().steps >= 100
    assert [pool.unsafe_buffer_pointer() for pool in runtime.state.pools] == pointers
    assert runtime.state.sampler.history.unsafe_buffer_pointer() == history


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_step_holds_no_copy_of_a_pool(deep_engine, shape):
    compiled = compiled_step(deep_engine, shape)
    pool = deep_engine._runtime.state.pools.k
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < pool.nbytes // 4
    assert memory.alias_size_in_bytes >= 2 * pool.nbytes
    dimensions = ",".join(str(size) for size in pool.shape)
    copies = re.findall(rf"%\S+ = f32\[{dimensions}\]\S* copy\(", compiled.as_text())
    assert copies == []


def test_a_step_that_reads_the_old_pool_would_be_noticed(deep_engine):
    runtime = deep_engine._runtime

    def careless(pool):
        return pool.at[5].set(1.0), pool[3].sum()

    memory = jax.jit(careless, donate_argnums=0).lower(runtime.state.pools.k).compile().memory_analysis()
    assert memory.temp_size_in_bytes >= runtime.state.pools.k.nbytes // 4


def test_the_compiled_program_does_not_grow_with_depth(tmp_path):
    sizes = []
    for layers in (2, 30):
        engine = make_engine(
            load_model(write_random_llama(tmp_path / str(layers), layers=layers)), kv_pool_bytes=4 << 20
        )
        sizes.append(len(compiled_step(engine, SHAPES[1]).as_text().splitlines()))
    assert sizes[1] < 1.5 * sizes[0]


def test_unrolled_layers_give_the_same_tokens_and_stay_in_place():
    prompt = np.arange(3, 40)
    looped, unrolled = (make_engine(golden_model("llama"), unroll_layers=unroll) for unroll in (False, True))
    pointer = unrolled._runtime.state.pools.v.unsafe_buffer_pointer()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert unrolled.generate([prompt], params)[0].tokens == looped.generate([prompt], params)[0].tokens
    assert unrolled._runtime.state.pools.v.unsafe_buffer_pointer() == pointer
