"""In bfloat16 and float16 every paged token is an argmax, ties allowed, of a cacheless forward over the same tokens.

Trajectories are not compared: where two logits tie, both continuations are right. A tie is defined by the arithmetic.
Against float32 compute with the same rounded weights, computing in the dtype moves the logits of a row by up to some
amount (the largest over the vocabulary); two logits of that row no further apart than this amount are in an order that
rounding decided.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from default_provider import PROVIDER
from dense_step import DenseModel
from engine_case import golden_model, golden_prompts, make_engine

from kv_execution import SamplingParams
from kv_kernels.reference import ReferencePlan, ReferenceProvider
from models import LoadedModel

TOKENS_PER_PAGE = 16
PARAMS = SamplingParams(max_tokens=72, ignore_eos=True)
CASES = ("llama", "llama_rope_llama3")
DTYPES = ("bfloat16", "float16")


class Verdict(NamedTuple):
    """Per generated token, in logits: how far it is below the best, what is a tie, how far the second best is."""

    below_best: np.ndarray
    tie: np.ndarray
    margin: np.ndarray


def widened(case: str, dtype: str) -> LoadedModel:
    """The float32 model with the weights that the model of `dtype` has."""
    exact = golden_model(case)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), golden_model(case, dtype).params)
    return dataclasses.replace(exact, params=params)


class Judge:
    """Judges sequences of at most 96 tokens by cacheless forwards, in the dtype and in float32."""

    def __init__(self, case: str, dtype: str) -> None:
        self._half, self._wide = DenseModel(golden_model(case, dtype)), DenseModel(widened(case, dtype))

    def __call__(self, prompt: np.ndarray, tokens: tuple[int, ...]) -> Verdict:
        sequence = np.concatenate([prompt, tokens])
        before = slice(len(prompt) - 1, len(sequence) - 1)
        logits = self._half.logits(sequence)[before]
        moved = logits - self._wide.logits(sequence)[before]
        best = np.sort(logits, axis=-1)
        return Verdict(
            below_best=best[:, -1] - logits[np.arange(len(tokens)), list(tokens)],
            # A constant added to a row chooses nothing.
            tie=np.abs(moved - moved.mean(axis=-1, keepdims=True)).max(axis=-1),
            margin=best[:, -1] - best[:, -2],
        )


def paged_continuations(case: str, dtype: str, provider: str = PROVIDER) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Four short prompts, run side by side so that their pages alternate in the pool, and their greedy tokens."""
    prompts = [prompt[:12] for prompt in golden_prompts(case)]
    engine = make_engine(golden_model(case, dtype), tokens_per_page=TOKENS_PER_PAGE, provider=provider)
    results = engine.generate(prompts, PARAMS)
    return [(prompt, result.tokens) for prompt, result in zip(prompts, results, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_each_paged_token_is_an_argmax_of_a_cacheless_forward(case: str, dtype: str) -> None:
    judge = Judge(case, dtype)
    for prompt, tokens in paged_continuations(case, dtype):
        assert (len(prompt) + len(tokens)) // TOKENS_PER_PAGE >= 4
        verdict = judge(prompt, tokens)
        wrong = np.flatnonzero(verdict.below_best > verdict.tie)
        assert not len(wrong), (
            f"tokens {wrong} are {verdict.below_best[wrong]} below the best, a tie is {verdict.tie[wrong]}"
        )
        # Where nearly everything ties, nearly everything passes.
        assert (verdict.margin > verdict.tie).mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_of_another_page_are_no_tie(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ReferenceProvider.plan

    def with_a_repeated_page(self: ReferenceProvider, table, shape) -> ReferencePlan:
        right = plan(self, table, shape)
        page_ids = right.page_ids.copy()
        second = table.page_indptr[:-1] + 1
        second = second[np.diff(table.page_indptr) > 2]
        page_ids[second] = page_ids[second - 1]
        return right._replace(page_ids=page_ids)

    monkeypatch.setattr(ReferenceProvider, "plan", with_a_repeated_page)
    judge = Judge("llama", dtype)
    for prompt, tokens in paged_continuations("llama", dtype, "reference"):
        verdict = judge(prompt, tokens)
        assert (verdict.below_best > verdict.tie).any()
