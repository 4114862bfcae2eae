"""The device side of a running engine: state, programs, and the dispatch and collection of single steps.

The runtime turns a step that the scheduler planned into padded arrays, runs the program of its shape, and brings the
sampled tokens back. Dispatch and collection are apart so that the host can plan the next step while the device works
on this one. The state is donated and rebound in one statement.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.page_table import KvPageTableV1
from kv_control.buckets import ShapeBuckets, StepShape, page_entries, scrub_entries
from kv_control.page_allocator import OutOfPagesError
from kv_control.scheduler import Scheduler, StepPlan
from kv_execution.pools import allocate_pools, poison_pages
from kv_execution.processes import PeerLostError
from kv_execution.requests import Request, TokenLogprob, TokenOutput
from kv_execution.sampling import Sampled, SamplingInputs, empty_sampler_state, set_request
from kv_execution.sampling_table import SamplingTable
from kv_execution.step import DeviceState, ForwardInputs, StepPrograms
from kv_kernels.provider import KernelProvider, PlanShape
from kv_kernels.tensor_parallel import TensorMesh


class DispatchedStep(NamedTuple):
    """A step on its way: the plan, and arrays that the device is filling."""

    plan: StepPlan
    sampled: Sampled


class InterruptedStepError(JaxkvError):
    """A step was cut off between its plan and its tokens, so what pages hold is not known any more."""


class RuntimeCounters:
    """What a runtime has done since it began."""

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.preemptions = 0
        self.copied_pages = 0
        self.peak_pages_in_use = 0
        self.shapes: set[StepShape] = set()


class PagedRuntime:
    """Owns the device state, the scheduler, and the requests that have not finished."""

    def __init__(
        self,
        params: Any,
        provider: KernelProvider,
        programs: StepPrograms,
        scheduler: Scheduler,
        buckets: ShapeBuckets,
        *,
        mesh: TensorMesh | None,
        debug: bool,
    ) -> None:
        self.layout = scheduler.layout
        self.buckets = buckets
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}
        self.counters = RuntimeCounters()
        self._params = params
        self._provider = provider
        self._programs = programs
        self._debug = debug
        self._num_processes = 1 if mesh is None else mesh.num_processes
        self._interrupted = False
        self._table = SamplingTable(buckets.max_rows)
        self.state = DeviceState(
            pools=allocate_pools(self.layout, mesh),
            sampler=empty_sampler_state(
                buckets.max_rows, buckets.max_context, None if mesh is None else mesh.replicated
            ),
        )

    @property
    def interrupted(self) -> bool:
        """Whether a step was cut off, after which nothing here can be trusted."""
        return self._interrupted

    def require_sound(self) -> None:
        """Raises InterruptedStepError after a step that was cut off."""
        if self._interrupted:
            raise InterruptedStepError(
                "a step of this engine was interrupted and its K/V may be incomplete; call init_paged_runtime() to "
                "start afresh, and submit the requests again"
            )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around everything from planning a step to taking its tokens: all of it happens, or the runtime is unsound.

        A plan publishes pages that its step has yet to write, and the state is donated to a call before it is bound to
        the result. OutOfPagesError is raised before either, and changes nothing.
        """
        self.require_sound()
        self._interrupted = True
        try:
            yield
        except OutOfPagesError:
            self._interrupted = False
            raise
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if self._num_processes == 1 or isinstance(error, JaxkvError):
                raise
            # A collective that fails comes as either.
            raise PeerLostError(
                f"a step of {self._num_processes} processes failed, which is how the end of one of them shows "
                f"({' '.join(str(error).split())[:200]}): start all of them again"
            ) from error
        self._interrupted = False

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, StepShape], None] | None = None) -> None:
        """Compile and run the step of every shape on padding alone, which changes nothing but the padding page."""
        for done, shape in enumerate(shapes):
            if progress is not None:
                progress(done, shape)
            with self.step():
                jax.block_until_ready(self._run(None, shape))
        self._set_request(self.buckets.max_rows, np.zeros(0, np.int32), {})  # a row past the last changes nothing
        if self._debug:
            self._poison(np.zeros(1, np.int32))

    def begin(self, row: int, request: Request | None = None) -> None:
        """`row` has begun: give the device its tokens, and `request`, if it samples, its parameters."""
        running = self.scheduler.running
        bias: Mapping[int, float] = {}
        if request is not None:
            request.cached_tokens = int(running.cached_tokens[row])
            bias = request.params.logit_bias
            self._table.assign(row, request)
        self._set_request(row, running.known_tokens(row, 0, int(running.num_known[row])), bias)

    def dispatch(self, plan: StepPlan) -> DispatchedStep:
        """Start a step on the device; returns at once where the backend runs asynchronously."""
        for row in plan.admitted:
            self.begin(row, self.requests[int(self.scheduler.running.request_id[row])])
        shape = self._shape_of(plan)
        self._check(plan)
        sampled = self._run(plan, shape)
        self._poison_freed()
        self._count(plan, shape)
        return DispatchedStep(plan, sampled)

    def collect(self, step: DispatchedStep) -> list[TokenOutput]:
        """Wait for a step's tokens and hand them to their requests, in the order of the step's rows."""
        sampled = Sampled(*(np.asarray(array) for array in step.sampled))
        gained = np.flatnonzero(
            self.scheduler.retire(step.plan, np.asarray(sampled.token[: len(step.plan.rows)], np.int32))
        )
        return [self._accept(int(step.plan.request_ids[index]), sampled, index) for index in gained.tolist()]

    def score(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step of one held request: log-probabilities [tokens, vocab] of what follows each of its tokens."""
        shape = self._shape_of(plan)
        self._check(plan)
        inputs = self._inputs(plan, shape)
        self.state, logprobs = self._programs.score(self._params, self.state, inputs)
        self._poison_freed()
        return np.asarray(logprobs)[: plan.table.tokens]

    def _run(self, plan: StepPlan | None, shape: StepShape) -> Sampled:
        self.state, logits = self._programs.forward(self._params, self.state, self._inputs(plan, shape))
        sampling = self._sampling_inputs(plan, shape)
        sampler, sampled = self._programs.sample(logits, self.state.sampler, sampling)
        self.state = self.state._replace(sampler=sampler)
        return sampled

    def _accept(self, request_id: int, sampled: Sampled, index: int) -> TokenOutput:
        request = self.requests[request_id]
        top = tuple(
            TokenLogprob(int(token), float(logprob))
            for token, logprob in zip(
                sampled.top_ids[index, : request.params.top_logprobs],
                sampled.top_logprobs[index, : request.params.top_logprobs],
                strict=True,
            )
            if token >= 0
        )
        return request.accept(int(sampled.token[index]), float(sampled.logprob[index]), top)

    def _shape_of(self, plan: StepPlan) -> StepShape:
        return self.buckets.shape_for(plan.table.tokens, plan.table.rows, int(plan.table.kv_len.max()))

    def _check(self, plan: StepPlan) -> None:
        """Debug mode, before a step: prove the bookkeeping, and make the pages loud that the step has to clear."""
        if self._debug:
            plan.table.validate(self.layout.num_pages)
            self.scheduler.residency.check_invariants()
            self._poison(plan.scrub_pages)

    def _poison_freed(self) -> None:
        """Debug mode, after a step: make every page loud that nobody holds.

        Not before it: a page may have been given back while the step was planned, for an equal one in the cache, and
        the step still reads it.
        """
        if self._debug:
            allocator = self.scheduler.residency.allocator
            freed = np.flatnonzero(allocator.dirty & (allocator.reference_count == 0))
            self._poison(freed.astype(np.int32))

    def _set_request(self, row: int, token_ids: NDArray[np.int32], logit_bias: Mapping[int, float]) -> None:
        self.state = self.state._replace(sampler=set_request(self.state.sampler, row, token_ids, logit_bias))

    def _poison(self, pages: NDArray[np.int32]) -> None:
        self.state = self.state._replace(pools=poison_pages(self.state.pools, pages, self.layout))

    def _inputs(self, plan: StepPlan | None, shape: StepShape) -> ForwardInputs:
        """The arrays of a step padded to `shape`; of padding alone where there is no plan."""
        tokens_per_page = self.layout.tokens_per_page
        token_rows = np.full(shape.tokens, self.buckets.max_rows, np.int32)
        positions = np.zeros(shape.tokens, np.int32)
        slots = np.arange(shape.tokens, dtype=np.int32) % tokens_per_page
        scrub_pages = np.full(scrub_entries(shape, tokens_per_page), -1, np.int32)
        copy_sources = np.zeros(shape.rows, np.int32)
        copy_targets = np.full(shape.rows, -1, np.int32)
        logit_rows = np.zeros(shape.rows, np.int32)
        table = _empty_table(tokens_per_page)
        if plan is not None:
            table = plan.table
            token_rows[: table.tokens] = plan.token_rows
            positions[: table.tokens] = table.positions
            slots[: table.tokens] = table.write_slots
            scrub_pages[: len(plan.scrub_pages)] = plan.scrub_pages
            copy_sources[: len(plan.copy_sources)] = plan.copy_sources
            copy_targets[: len(plan.copy_targets)] = plan.copy_targets
            logit_rows[: table.rows] = table.query_start[1:] - 1
        plan_shape = PlanShape(shape.tokens, shape.rows, page_entries(shape, tokens_per_page))
        return ForwardInputs(
            token_rows=token_rows,
            positions=positions,
            slots=slots,
            scrub_pages=scrub_pages,
            copy_sources=copy_sources,
            copy_targets=copy_targets,
            logit_rows=logit_rows,
            plan=self._provider.plan(table, plan_shape),
        )

    def _sampling_inputs(self, plan: StepPlan | None, shape: StepShape) -> SamplingInputs:
        if plan is None:
            none = np.zeros(0, np.int64)
            return self._table.inputs(none, none, none.astype(np.bool_), shape.rows)
        return self._table.inputs(plan.rows, plan.positions, plan.samples, shape.rows)

    def _count(self, plan: StepPlan, shape: StepShape) -> None:
        counters = self.counters
        counters.steps += 1
        query_len = np.diff(plan.table.query_start)
        decodes = int((query_len == 1).sum())
        counters.decode_tokens += decodes
        counters.prefill_tokens += plan.table.tokens - decodes
        counters.preemptions += len(plan.preempted)
        counters.copied_pages += len(plan.copy_targets)
        counters.shapes.add(shape)
        counters.peak_pages_in_use = max(counters.peak_pages_in_use, self.scheduler.residency.allocator.live_pages)


def _empty_table(tokens_per_page: int) -> KvPageTableV1:
    """A step of no rows, for warm-up."""
    none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return KvPageTableV1(none, none, start, start, none, none, none, tokens_per_page)
