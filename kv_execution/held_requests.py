"""Requests that a caller moves by hand: they keep their row and pages until they are released.

Each step is waited for, since the caller decides about the next one by its tokens. Not part of any queue, so that they
are never preempted.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_common.model_spec import ModelSpec
from kv_control.request_map import RequestHandle, StaleHandleError
from kv_execution.batcher import check_generates, check_params, checked_prompt
from kv_execution.prompt_programs import CompileBeside, PromptPrograms
from kv_execution.requests import FinishReason, NanLogitsError, TokenLogprob, TokenOutput, make_request
from kv_execution.runtime import PagedRuntime
from kv_execution.sampling_params import SamplingParams

TokenIds = Sequence[int] | NDArray[np.integer]


class PrefillResult(NamedTuple):
    """A held request and its first token; `cached_tokens` is how much of the prompt was not computed.

    `logprob` is None where it was not asked for.
    """

    handle: RequestHandle
    token: int
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    cached_tokens: int


class HeldRequests:
    """The held requests of one runtime. Every method raises InterruptedStepError after a step that was cut off."""

    def __init__(
        self,
        runtime: PagedRuntime,
        spec: ModelSpec,
        request_ids: "itertools.count[int]",
        prompt_programs: PromptPrograms,
        *,
        draw_seed: Callable[[], int],
    ) -> None:
        self._runtime = runtime
        self._prompt_programs = prompt_programs
        self._spec = spec
        self._draw_seed = draw_seed
        self._request_ids = request_ids
        self._held: dict[int, RequestHandle] = {}

    def prefill(
        self, token_ids: TokenIds, params: SamplingParams, namespace: bytes, adapter_slot: int
    ) -> PrefillResult:
        """Hold a request of a prompt and compute its first token.

        Raises PromptError, SamplingParamsError, RequestTooLargeError, NoFreeRowError, OutOfPagesError, or
        NanLogitsError; nothing is held then.
        """
        runtime = self._runtime
        prompt = checked_prompt(token_ids, self._spec.vocab_size)
        check_params(params, self._spec)
        request_id = next(self._request_ids)
        handle = runtime.scheduler.hold(request_id, prompt, max_new_tokens=params.max_tokens, namespace=namespace)
        total = int(runtime.scheduler.running.max_tokens_total[handle.row])
        request = make_request(request_id, len(prompt), total, params, self._spec, self._draw_seed, adapter_slot)
        runtime.requests[request_id] = request
        runtime.begin(handle.row, request)
        self._held[request_id] = handle
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard, handle)
            outputs: list[TokenOutput] = []
            while not outputs:
                outputs = self._run([handle])
            first = outputs[0]
            if first.token is None:
                raise NanLogitsError
            undo.pop_all()
        return PrefillResult(
            handle, first.token, first.logprob, first.top_logprobs, first.finish_reason, first.cached_tokens
        )

    def generate(self) -> dict[RequestHandle, TokenOutput]:
        """One more token for every request that has not finished. Raises OutOfPagesError, with nothing changed."""
        going = [
            handle for request_id, handle in self._held.items() if not self._runtime.requests[request_id].has_ended
        ]
        if not going:
            return {}
        return {self._held[output.request_id]: output for output in self._run(going)}

    def release(self, handle: RequestHandle) -> None:
        """Free a request's row and pages. Raises StaleHandleError where it was released before, or is no handle."""
        if not isinstance(handle, RequestHandle):
            raise StaleHandleError(f"{handle!r} is no handle: give the one that prefill_paged returned")
        self._runtime.scheduler.residency.request_map.row_of(handle)
        self._discard(handle)

    def score(
        self, token_ids: TokenIds, namespace: bytes, adapter_slot: int, beside: CompileBeside | None
    ) -> Iterator[NDArray[np.float32]]:
        """Log-probabilities of what follows each token of a prompt, step by step in parts [tokens, vocab], which are
        empty while a program compiles `beside`. Raises what `prefill` raises.
        """
        check_generates(self._spec)
        return self._score(checked_prompt(token_ids, self._spec.vocab_size), namespace, adapter_slot, beside)

    def _score(
        self, prompt: NDArray[np.int32], namespace: bytes, adapter_slot: int, beside: CompileBeside | None
    ) -> Iterator[NDArray[np.float32]]:
        runtime = self._runtime
        # Every token has to be computed for its logits, so nothing is taken from the cache.
        handle = runtime.scheduler.hold(
            next(self._request_ids), prompt, max_new_tokens=0, namespace=namespace, read_cache=False
        )
        try:
            runtime.begin(handle.row, adapter_slot=adapter_slot)
            rows = np.array([handle.row])
            while runtime.scheduler.running.kv_len[handle.row] < len(prompt):
                part = self._prompt_programs.score(rows, beside)
                yield np.zeros((0, self._spec.vocab_size), np.float32) if part is None else part
        finally:
            if not runtime.interrupted:
                runtime.scheduler.finish(handle.request_id)

    def _run(self, handles: list[RequestHandle]) -> list[TokenOutput]:
        runtime = self._runtime
        with runtime.step():
            plan = runtime.scheduler.schedule_held(np.array([handle.row for handle in handles]))
            return runtime.collect(runtime.dispatch(plan))

    def _discard(self, handle: RequestHandle) -> None:
        if not self._runtime.interrupted:
            self._runtime.scheduler.finish(handle.request_id)
            del self._held[handle.request_id], self._runtime.requests[handle.request_id]
