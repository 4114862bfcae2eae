"""Steps are padded to the shapes of their programs, and the kernels are told how much of them is padding."""

import jax
import pytest
from engine_case import golden_model, make_engine

from kv_execution import SamplingParams
from kv_kernels.reference import ReferenceProvider


@pytest.fixture
def given(monkeypatch) -> set[tuple[int, int]]:
    """What the products of the network and those behind it are given: used tokens, of so many."""
    seen: set[tuple[int, int]] = set()
    linear = ReferenceProvider.linear

    def record(x: jax.Array, used: jax.Array | None) -> None:
        assert used is not None
        jax.debug.callback(lambda count: seen.add((int(count), len(x))), used)

    def recorded_linear(self, x, *parts, used=None, **settings):
        record(x, used)
        return linear(self, x, *parts, used=used, **settings)

    def recorded_most_likely(self, x, matrix, *, norm, used=None):
        record(x, used)
        (logits,) = linear(self, x, (matrix,), None, norm=norm)
        return self.argmax(logits)

    monkeypatch.setattr(ReferenceProvider, "linear", recorded_linear)
    monkeypatch.setattr(ReferenceProvider, "most_likely", recorded_most_likely)
    return seen


def test_every_product_knows_how_many_tokens_and_rows_are_used(given):
    engine = make_engine(golden_model("llama"), provider="reference", max_requests=8, max_step_tokens=32)
    engine.init_paged_runtime()
    batcher = engine.batcher()
    for prompt in ([5, 6, 7], [8, 9, 10, 11], [12, 13]):
        batcher.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    steps = []
    while batcher.has_unfinished:
        given.clear()
        batcher.step()
        jax.effects_barrier()
        steps.append(set(given))
    # The prompts and their rows, then a token each.
    assert steps[:2] == [{(9, 16), (3, 8)}, {(3, 4)}]


def test_a_chunk_that_samples_nothing_asks_for_no_row(given):
    engine = make_engine(golden_model("llama"), provider="reference", max_requests=2, max_step_tokens=16)
    engine.init_paged_runtime()
    batcher = engine.batcher()
    batcher.submit(list(range(5, 35)), SamplingParams(max_tokens=1))
    batcher.step()
    jax.effects_barrier()
    assert (0, 2) in given
