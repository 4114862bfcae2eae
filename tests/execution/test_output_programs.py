"""What follows the network: logits, or the most likely tokens without them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_case import golden_model, make_engine

from kv_control.buckets import StepShape
from kv_execution import PagedEngine
from kv_execution.sampler_state import SamplerState
from kv_execution.sampling import GreedyInputs
from kv_kernels.native import NativeProvider
from kv_kernels.output_products import OutputProducts
from kv_kernels.reference import ReferenceProvider

ROWS = 4


def greedy_program(engine: PagedEngine, hidden: jax.Array) -> jax.stages.Lowered:
    engine.init_paged_runtime()
    runtime = engine._runtime
    inputs = runtime._table.padding(len(hidden), GreedyInputs)
    return runtime.programs.greedy.lower(runtime.params, hidden, runtime.state.sampler, inputs)


def hidden_states(model, dtype: str = "float32") -> jax.Array:
    rows = np.random.default_rng(0).standard_normal((ROWS, model.spec.hidden_size))
    return jnp.asarray(rows, dtype)


def whole_logits(text: str, vocab: int) -> list[str]:
    return re.findall(rf"\w+\[{ROWS},{vocab}\]", text)


@pytest.mark.parametrize("case", ["llama", "llama_bias_tied"])
def test_most_likely_tokens_are_found_without_an_array_of_logits(case):
    model = golden_model(case)
    natively, by_xla = (
        greedy_program(make_engine(model, provider=provider), hidden_states(model)).compile().as_text()
        for provider in ("native", "reference")
    )
    assert "jaxkv_most_likely" in natively
    assert whole_logits(natively, model.spec.vocab_size) == []
    assert whole_logits(by_xla, model.spec.vocab_size) != []


def test_the_network_of_a_step_ends_before_the_vocabulary():
    model = golden_model("llama")
    engine = make_engine(model, provider="reference")
    engine.init_paged_runtime()
    runtime, shape = engine._runtime, StepShape(ROWS, ROWS, 128)
    lowered = runtime.programs.forward.lower(model.params, runtime.state, runtime._inputs.of(None, shape))
    assert lowered.out_info.hidden.shape == (ROWS, model.spec.hidden_size)
    assert f"{ROWS}x{model.spec.vocab_size}x" not in lowered.as_text()


@pytest.mark.parametrize("provider", ["native", "reference"])
@pytest.mark.parametrize("case", ["llama", "llama_bias_tied", "gemma2", "granite"])
def test_the_most_likely_tokens_are_those_of_the_logits(case, provider):
    model = golden_model(case)
    engine = make_engine(model, provider=provider, max_requests=ROWS)
    engine.init_paged_runtime()
    runtime, hidden = engine._runtime, hidden_states(model)
    logits = runtime.programs.logits(model.params, hidden)
    inputs = GreedyInputs(np.zeros(ROWS, np.int32), np.arange(ROWS, dtype=np.int32))
    state = SamplerState(*(jnp.array(each) for each in runtime.state.sampler))
    token = runtime.programs.greedy(model.params, hidden, state, inputs).token
    np.testing.assert_array_equal(token, np.asarray(logits).argmax(1))


def test_rows_behind_the_last_that_samples_are_not_looked_at():
    model = golden_model("llama")
    engine = make_engine(model, provider="native", max_requests=ROWS)
    engine.init_paged_runtime()
    runtime = engine._runtime
    hidden = hidden_states(model).at[3].set(np.nan)
    for sampling, expected in (([1], 2), ([0, 2], 3), ([], 0)):
        history_row = np.full(ROWS, ROWS, np.int32)
        history_row[sampling] = sampling
        state = SamplerState(*(jnp.array(each) for each in runtime.state.sampler))
        inputs = GreedyInputs(np.zeros(ROWS, np.int32), history_row)
        token = np.asarray(runtime.programs.greedy(model.params, hidden, state, inputs).token)
        assert ((token >= 0) == (np.arange(ROWS) < expected)).all()


class GivenLogits(OutputProducts):
    """Products that are there already, in the place of x."""

    def logits(self, x, matrix, vocab_size, *, norm):
        return x

    def most_likely(self, x, matrix, vocab_size, *, norm):
        return self.argmax(x)


@pytest.mark.parametrize("provider", [NativeProvider(), ReferenceProvider()])
@pytest.mark.parametrize("changes", [{"logit_divisor": 3.0}, {"logit_soft_cap": 0.1}])
def test_logits_that_are_rounded_to_equals_keep_the_first(provider, changes):
    model = golden_model("llama")
    decoder = type(model.decoder)(dataclasses.replace(model.decoder.config, **changes), "float32").bind(model.params)
    # Of floats that follow each other several are a third of the same number, and all are capped to the same.
    ascending = (np.float32(1.5).view(np.int32) + np.arange(40, dtype=np.int32).reshape(8, 5)).view(np.float32)
    logits, most_likely = (
        function(ascending, GivenLogits(provider)) for function in (decoder.logits, decoder.most_likely)
    )
    np.testing.assert_array_equal(most_likely, np.asarray(logits).argmax(1))
    assert (np.asarray(most_likely) < 4).any(), "nothing was rounded to equals"
