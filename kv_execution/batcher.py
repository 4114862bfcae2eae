"""Continuous batching: submit at any time, step, and take the tokens as they come.

One step stays on the device while the host plans the next, so `step` returns the tokens of the step before the one it
starts. A request that ends on a stop token is therefore known to have ended one step late; what that step computed for
it is dropped. Where all requests do nothing but decode, and steps are short, a step is a burst of several.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.model_spec import ModelSpec
from kv_control.page_allocator import OutOfPagesError
from kv_control.step_plan import StepPlan
from kv_execution.adapters import AdapterChoice, Adapters
from kv_execution.burst_pace import BurstPace
from kv_execution.constraints import TokenConstraint
from kv_execution.requests import TokenOutput, make_request
from kv_execution.runtime import DispatchedStep, PagedRuntime
from kv_execution.sampling_params import MAX_LOGIT_BIAS, SamplingParams, SamplingParamsError

MAX_PRIORITY = 1_000_000


class PromptError(JaxkvError):
    """A prompt that is empty or names tokens that the model does not have."""


class RequestOptionError(JaxkvError):
    """A priority, deadline or salt that is not one."""


class RequestEndedError(JaxkvError):
    """A request that has ended already, or that never was."""


def checked_prompt(token_ids: Sequence[int] | NDArray[np.integer], vocab_size: int) -> NDArray[np.int32]:
    """`token_ids` as int32 [tokens].

    Raises PromptError where it is empty, not whole numbers, or outside the vocabulary.
    """
    try:
        prompt = np.asarray(token_ids)
    except ValueError as error:  # lists of different lengths
        raise PromptError("a prompt is a flat list of whole numbers; got lists within a list") from error
    if prompt.size == 0:
        raise PromptError("the prompt is empty; give at least one token")
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise PromptError(f"a prompt is a flat list of whole numbers; got {prompt.dtype} of shape {prompt.shape}")
    outside = (prompt < 0) | (prompt >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise PromptError(f"token id {prompt[at]} at position {at} is outside the vocabulary of {vocab_size} tokens")
    return prompt.astype(np.int32)


class Batcher:
    """The queue of an engine; one per engine, on the engine's own runtime."""

    def __init__(
        self,
        runtime: PagedRuntime,
        spec: ModelSpec,
        namespace_of: Callable[[str, AdapterChoice], bytes],
        adapters: Adapters,
        request_ids: "itertools.count[int]",
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self._runtime = runtime
        self._spec = spec
        self._namespace_of = namespace_of
        self._adapters = adapters
        self._request_ids = request_ids
        self._clock = clock
        self._draw_seed = draw_seed
        self._prompts: dict[int, tuple[NDArray[np.int32], str, AdapterChoice]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._pace = BurstPace(runtime.burst_s, clock)
        self._in_flight: DispatchedStep | None = None
        self._undelivered: list[TokenOutput] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or has a token that `step` has not returned yet."""
        return bool(self._prompts or self._undelivered)

    def submit(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        read_cache: bool = True,
        adapter: str | None = None,
        constraint: TokenConstraint | None = None,
    ) -> int:
        """Queue a request and return its id.

        A higher `priority` goes first and may push out running requests of a lower one. After `deadline_s` seconds the
        request ends with what it has. Requests share cached pages only under the same `cache_salt`; with
        `read_cache=False` it computes everything itself. `adapter` is the name of a loaded one. A `constraint` rules
        out tokens, and is this request's alone.

        Raises PromptError, SamplingParamsError for ids outside the vocabulary, AdapterNameError, RequestTooLargeError,
        QueueFullError; nothing is queued then.
        """
        prompt = checked_prompt(token_ids, self._spec.vocab_size)
        choice = self._adapters.choice(adapter)
        params = params or SamplingParams()
        return self._queue(prompt, params, priority, deadline_s, cache_salt, read_cache, None, choice, constraint)

    def fork(
        self,
        request_id: int,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        constraint: TokenConstraint | None = None,
    ) -> int:
        """Queue another sample of an unfinished request's prompt, which shares the pages of the prompt; returns its id.

        Raises RequestEndedError, and what `submit` raises.
        """
        if request_id not in self._prompts:
            raise RequestEndedError(f"request {request_id} has ended or never was; submit its prompt again")
        prompt, salt, choice = self._prompts[request_id]
        params = params or SamplingParams()
        return self._queue(prompt, params, priority, deadline_s, salt, True, request_id, choice, constraint)

    def step(self) -> list[TokenOutput]:
        """Start the next step and return the tokens of the one before it, which may be none, or some a request.

        Raises OutOfPagesError where requests wait for pages that only `release` of held handles can free.
        """
        self._undelivered += self._expired()
        self._undelivered += self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def run_to_end(self, request_ids: Sequence[int]) -> None:
        """Step until all of these have ended; tokens of other requests are kept for the next `step`."""
        awaited = set(request_ids)
        while not awaited.isdisjoint(self._prompts):
            outputs = self._expired() + self._advance()
            self._undelivered += [output for output in outputs if output.request_id not in awaited]

    def abort(self, request_id: int) -> bool:
        """End a request in any state and free what it holds; False where it has ended already."""
        if request_id not in self._prompts or self._runtime.interrupted:
            return False
        self._end(request_id)
        return True

    def is_waiting(self, request_id: int) -> bool:
        """Whether a request is in the queue, so that no step has touched it since it was put there."""
        return request_id in self._prompts and self._runtime.scheduler.residency.handle_of(request_id) is None

    def preempt(self, request_id: int) -> bool:
        """Take a running request's pages away; it keeps its tokens, returns to the queue, and continues where it was.

        False where it does not run, so that there is nothing to take.
        """
        if self._in_flight is not None:
            with self._runtime.step():
                in_flight, self._in_flight = self._in_flight, None
                self._undelivered += self._collect(in_flight)
        return request_id in self._prompts and self._runtime.scheduler.preempt(request_id)

    def _queue(
        self,
        prompt: NDArray[np.int32],
        params: SamplingParams,
        priority: int,
        deadline_s: float | None,
        cache_salt: str,
        read_cache: bool,
        parent: int | None,
        adapter: AdapterChoice,
        constraint: TokenConstraint | None,
    ) -> int:
        self._runtime.require_sound()
        check_params(params, self._spec)
        _check_options(priority, deadline_s, cache_salt)
        request_id = next(self._request_ids)
        queued = self._runtime.scheduler.submit(
            request_id,
            prompt,
            max_new_tokens=params.max_tokens,
            priority=priority,
            namespace=self._namespace_of(cache_salt, adapter),
            read_cache=read_cache,
            parent=parent,
        )
        self._runtime.requests[request_id] = make_request(
            *(request_id, len(prompt), queued.max_tokens_total, params, self._spec, self._draw_seed, adapter.slot),
            constraint,
        )
        self._prompts[request_id] = prompt, cache_salt, adapter
        if deadline_s is not None:
            heapq.heappush(self._deadlines, (self._clock() + deadline_s, request_id))
        return request_id

    def _advance(self) -> list[TokenOutput]:
        with self._runtime.step():
            previous = self._in_flight
            most_steps = self._pace.steps(self._runtime.most_burst_steps())
            plan = self._runtime.scheduler.schedule(may_preempt=previous is None, most_steps=most_steps)
            if plan is not None and previous is not None and self._runtime.awaits_tokens(plan):
                return self._advance_constrained(previous, plan)
            self._in_flight = None if plan is None else self._runtime.dispatch(plan)
            if previous is not None:
                return self._collect(previous)
            if plan is None and self._prompts:
                raise OutOfPagesError(1, self._runtime.scheduler.residency.obtainable_pages)
            return []

    def _advance_constrained(self, previous: DispatchedStep, plan: StepPlan) -> list[TokenOutput]:
        """What may come next depends on the tokens of `previous`; the network of `plan` runs while they are awaited."""
        hidden = self._runtime.forward(plan)
        self._in_flight = None
        outputs = self._collect(previous)
        if self._prompts:
            self._in_flight = self._runtime.choose(plan, hidden)
        return outputs

    def _collect(self, step: DispatchedStep) -> list[TokenOutput]:
        outputs = self._runtime.collect(step)
        self._pace.collected(step.plan.steps)
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output.request_id)
        return outputs

    def _expired(self) -> list[TokenOutput]:
        """End the requests whose time is up."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            request_id = heapq.heappop(self._deadlines)[1]
            if request_id in self._prompts:
                outputs.append(self._runtime.requests[request_id].end("deadline"))
                self._end(request_id)
        return outputs

    def _end(self, request_id: int) -> None:
        self._runtime.scheduler.finish(request_id)
        del self._prompts[request_id], self._runtime.requests[request_id]
        if not self._prompts:
            # Nothing on the device can matter any more, and a step that nobody waits for must not outlive its requests.
            self._in_flight = None
            self._deadlines.clear()


def check_generates(spec: ModelSpec) -> None:
    """Raises RequestOptionError for a model that has labels in the place of a vocabulary, or no head at all."""
    if spec.num_labels == 0:
        raise RequestOptionError(f"{spec.name} has no output matrix and generates nothing; use embed")
    if spec.num_labels is not None:
        raise RequestOptionError(
            f"{spec.name} classifies sequences with {spec.num_labels} labels and generates nothing; use classify or "
            "embed"
        )


def check_params(params: SamplingParams, spec: ModelSpec) -> None:
    """Raises SamplingParamsError for anything but parameters that fit the model's vocabulary, and RequestOptionError
    for a model that generates nothing.
    """
    if not isinstance(params, SamplingParams):
        raise SamplingParamsError(f"params is a {type(params).__name__}; give SamplingParams(...)")
    check_generates(spec)
    params.check_vocabulary(spec.vocab_size)
    entries = len(params.logit_bias) + len(params.stop_token_ids) + len(spec.eos_token_ids)
    if params.min_tokens and entries > MAX_LOGIT_BIAS:
        raise SamplingParamsError(
            f"logit_bias and stop tokens have {entries} entries: with min_tokens give at most {MAX_LOGIT_BIAS} together"
        )


def _check_options(priority: int, deadline_s: float | None, cache_salt: str) -> None:
    whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not whole or abs(priority) > MAX_PRIORITY:
        raise RequestOptionError(
            f"priority is {priority!r}; give a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    if deadline_s is not None and not (isinstance(deadline_s, (int, float)) and deadline_s >= 0):
        raise RequestOptionError(f"deadline_s is {deadline_s!r}; give seconds from now, 0 or more, or None")
    if not isinstance(cache_salt, str):
        raise RequestOptionError(f"cache_salt is a {type(cache_salt).__name__}; give a string")
