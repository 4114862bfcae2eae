"""Prompts to one vector each: the final hidden states of their tokens, pooled on the device chunk by chunk.

Prompts are held side by side, as many as have rows and pages, and computed in steps of the engine's budget. A cached
page has no hidden states, so nothing is read from the cache; what is computed is published as ever. A row's sum is
added up in the order of its tokens; neighbours and chunks change it by rounding only.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.model_spec import ModelSpec
from kv_control.buckets import StepShape
from kv_control.request_map import RequestHandle
from kv_control.step_plan import StepPlan
from kv_execution.batcher import checked_prompt
from kv_execution.held_requests import TokenIds
from kv_execution.prompt_programs import CompileBeside, PromptPrograms
from kv_execution.runtime import PagedRuntime

POOLINGS = ("mean", "last", "cls")
"""The mean over all tokens, the last token, or the first."""

SCORES = "scores"
"""What a classifier makes of the last token, in the place of a vector."""


class EmbeddingError(JaxkvError):
    """A pooling that there is not, or that the model cannot be asked for."""


class Embedder:
    """Pools the hidden states of one runtime's model."""

    def __init__(
        self,
        runtime: PagedRuntime,
        spec: ModelSpec,
        request_ids: "itertools.count[int]",
        prompt_programs: PromptPrograms,
    ) -> None:
        self._runtime = runtime
        self._prompt_programs = prompt_programs
        self._spec = spec
        self._request_ids = request_ids

    def steps(
        self,
        prompts: Sequence[TokenIds],
        pooling: str,
        namespace: bytes,
        adapter_slot: int,
        normalize: bool,
        beside: CompileBeside | None,
    ) -> Iterator[NDArray[np.float32]]:
        """One vector for each of `prompts` [tokens], in order and step by step: the vectors [n, hidden] f32 of those
        that a step has ended, which are none for most, and for as long as a program compiles `beside`. For SCORES they
        are [n, labels].

        Raises PromptError and EmbeddingError, and with the steps what `HeldRequests.prefill` raises for a prompt that
        does not fit; nothing is held then.
        """
        none = self.none(pooling)
        checked = [checked_prompt(prompt, self._spec.vocab_size) for prompt in prompts]
        return self._steps(checked, pooling, namespace, adapter_slot, normalize, beside, none)

    def _steps(
        self,
        prompts: Sequence[NDArray[np.int32]],
        pooling: str,
        namespace: bytes,
        adapter_slot: int,
        normalize: bool,
        beside: CompileBeside | None,
        none: NDArray[np.float32],
    ) -> Iterator[NDArray[np.float32]]:
        done = 0
        while done < len(prompts):
            handles: list[RequestHandle] = []
            try:
                self._hold(prompts[done:], namespace, adapter_slot, handles)
                rows = np.array([handle.row for handle in handles])
                sums = self._zeros()
                while (going := self._unfinished(rows)).size:
                    added = self._prompt_programs.pool(going, partial(self._weights, pooling), sums, beside)
                    sums = sums if added is None else added
                    yield none
                if pooling == SCORES:
                    sums = self._runtime.programs.classify(self._runtime.params, sums)
                vectors = np.asarray(sums)[rows]
            finally:
                if not self._runtime.interrupted:
                    for handle in handles:
                        self._runtime.scheduler.finish(handle.request_id)
            done += len(handles)
            # With nothing held, so that those who wait for a row get one.
            yield normalized(vectors) if normalize and pooling != SCORES else vectors

    def warm_up(self, shapes: Sequence[StepShape], progress: Callable[[int, StepShape], None] | None) -> None:
        """Compile what `steps` runs for SCORES, for steps of these shapes."""
        for done, shape in enumerate(shapes):
            if progress is not None:
                progress(done, shape)
            self._prompt_programs.compile_pool(shape, self._zeros())
        if self._spec.num_labels:
            np.asarray(self._runtime.programs.classify(self._runtime.params, self._zeros()))

    def none(self, pooling: str) -> NDArray[np.float32]:
        """The vectors of no prompts. Raises EmbeddingError for a pooling that there is not, or not for this model."""
        if pooling == SCORES:
            check_classifies(self._spec)
            return np.zeros((0, self._spec.num_labels or 0), np.float32)
        check_pooling(pooling)
        return np.zeros((0, self._spec.hidden_size), np.float32)

    def _hold(
        self,
        prompts: Sequence[NDArray[np.int32]],
        namespace: bytes,
        adapter_slot: int,
        handles: list[RequestHandle],
    ) -> None:
        """Hold the first of `prompts`, and those after it that have rows and pages beside it."""
        scheduler = self._runtime.scheduler
        room = scheduler.residency.obtainable_pages
        for prompt in prompts:
            room -= scheduler.residency.pages_to_run(len(prompt))
            if handles and (room < 0 or not scheduler.residency.request_map.free_rows):
                return
            handles.append(
                scheduler.hold(next(self._request_ids), prompt, max_new_tokens=0, namespace=namespace, read_cache=False)
            )
            self._runtime.begin(handles[-1].row, adapter_slot=adapter_slot)

    def _zeros(self) -> jax.Array:
        """A sum for every row of the engine."""
        zeros = np.zeros((self._runtime.buckets.max_rows, self._spec.hidden_size), np.float32)
        history = jnp.asarray(self._runtime.state.sampler.history)
        # Bound to a device, it would bind the state to it, for which every program would have to be compiled again.
        return jax.device_put(zeros, history.sharding if history.committed else None)

    def _unfinished(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        running = self._runtime.scheduler.running
        return rows[running.kv_len[rows] < running.prompt_len[rows]]

    def _weights(self, pooling: str, plan: StepPlan) -> NDArray[np.float32]:
        """What each token [tokens] of a step counts for in its row's sum."""
        lengths, positions = self._runtime.scheduler.running.prompt_len[plan.token_rows], plan.table.positions
        if pooling == "mean":
            return (1 / lengths).astype(np.float32)
        return (positions == (0 if pooling == "cls" else lengths - 1)).astype(np.float32)


def check_pooling(pooling: str) -> None:
    """Raises EmbeddingError for one that there is not."""
    if pooling not in POOLINGS:
        raise EmbeddingError(f"pooling is {pooling!r}; give one of {', '.join(POOLINGS)}")


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors [n, hidden] of length 1; one of zeros stays."""
    length = np.sqrt(np.sum(np.square(vectors), axis=-1, keepdims=True))
    return np.divide(vectors, np.where(length == 0, 1, length), dtype=np.float32)


def check_classifies(spec: ModelSpec) -> None:
    """Raises EmbeddingError for a model without a classification head."""
    if not spec.num_labels:
        raise EmbeddingError(f"{spec.name} has no classification head; use embed, or another model")
