"""The device side of a running engine: state, programs, and the dispatch and collection of single steps.

The runtime turns a step that the scheduler planned into padded arrays, runs the program of its shape, and brings the
sampled tokens back. Dispatch and collection are apart so that the host can plan the next step while the device works
on this one. The state is donated and rebound in one statement.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_control.buckets import ShapeBuckets, StepShape
from kv_control.page_allocator import OutOfPagesError
from kv_control.scheduler import Scheduler
from kv_control.step_plan import StepPlan
from kv_execution.compilation_cache import reporting_cache_faults
from kv_execution.pools import allocate_pools, poison_pages
from kv_execution.processes import connect
from kv_execution.requests import Request, TokenLogprob, TokenOutput
from kv_execution.runtime_counters import RuntimeCounters
from kv_execution.sampler_programs import choose_tokens, compile_sampler
from kv_execution.sampler_state import empty_sampler_state, set_request
from kv_execution.sampling import GreedyInputs, Sampled, SamplingInputs, StepSampling
from kv_execution.sampling_table import SamplingTable
from kv_execution.step import StepPrograms
from kv_execution.step_inputs import StepInputs
from kv_execution.step_values import MAX_BURST_STEPS, BurstInputs, DeviceState, ForwardInputs, GreedyResult
from kv_kernels.adapters import NO_ADAPTER
from kv_kernels.peers import together
from kv_kernels.provider import KernelProvider
from kv_kernels.tensor_parallel import TensorMesh


class DispatchedStep(NamedTuple):
    """A step on its way: the plan, and arrays that the device is filling: `token` [rows] i32, or of a burst
    [MAX_BURST_STEPS, rows]; `sampled` where more is asked for.
    """

    plan: StepPlan
    token: Future[NDArray[np.int32]]
    sampled: Sampled | None


class InterruptedStepError(JaxkvError):
    """A step was cut off between its plan and its tokens, so what pages hold is not known any more."""


class PagedRuntime:
    """Owns the device state, the scheduler, and the requests that have not finished."""

    def __init__(
        self,
        params: Any,
        provider: KernelProvider,
        programs: StepPrograms,
        scheduler: Scheduler,
        buckets: ShapeBuckets,
        vocab_size: int,
        *,
        mesh: TensorMesh | None,
        has_adapters: bool,
        burst_s: float,
        debug: bool,
    ) -> None:
        self.layout = scheduler.layout
        self.buckets = buckets
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}
        self.counters = RuntimeCounters()
        self.params = params
        self.programs = programs
        self._debug = debug
        self._num_processes = 1 if mesh is None else mesh.num_processes
        self._interrupted = False
        self._table = SamplingTable(buckets.max_rows, vocab_size)
        self._adapter_slots = np.full(buckets.max_rows, NO_ADAPTER, np.int32)
        self._inputs = StepInputs(
            provider, self.layout, buckets.max_rows, self._adapter_slots if has_adapters else None
        )
        # Processes would have to agree on how long a burst is.
        can_burst = self._num_processes == 1 and burst_s > 0 and self._inputs.can_burst(buckets.shape_for(1, 1, 1))
        self.burst_s = burst_s if can_burst else 0.0
        self._ran: set[tuple[object, ...]] = set()
        self._waiter = ThreadPoolExecutor(1, "jaxkv-tokens")
        connect(mesh)
        with reporting_cache_faults():
            self.state = DeviceState(
                pools=allocate_pools(self.layout, provider, mesh),
                sampler=empty_sampler_state(
                    buckets.max_rows, buckets.max_context, None if mesh is None else mesh.replicated
                ),
            )
            self._set_request(self.buckets.max_rows, np.zeros(0, np.int32), ())  # a row past the last changes nothing

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
            with together("a step", self._num_processes):
                yield
        except OutOfPagesError:
            self._interrupted = False
            raise
        self._interrupted = False

    def warm_up(
        self,
        shapes: Iterable[StepShape],
        progress: Callable[[int, StepShape], None] | None = None,
        *,
        samplers: Collection[type[StepSampling]] = (GreedyInputs, SamplingInputs),
    ) -> None:
        """Compile the step of every shape, and run nothing; with the samplers that take these kinds of inputs."""
        for done, shape in enumerate(shapes):
            if progress is not None:
                progress(done, shape)
            with reporting_cache_faults():
                forward = self.programs.forward.lower(self.params, self.state, self._inputs.of(None, shape))
                forward.compile()
                hidden = forward.out_info.hidden
                for kind in samplers:
                    sampling = self._table.padding(shape.rows, kind)
                    compile_sampler(self.programs, self.params, hidden, self.state.sampler, sampling)
                if self.burst_s and GreedyInputs in samplers and shape.tokens == shape.rows:
                    burst = self._inputs.burst_of(None, shape)
                    self.programs.burst.lower(self.params, self.state, burst).compile()
        if self._debug:
            self._poison(np.zeros(1, np.int32))

    def begin(self, row: int, request: Request | None = None, *, adapter_slot: int = NO_ADAPTER) -> None:
        """`row` has begun: give the device its tokens, and `request`, if it samples, its parameters; one that does not
        sample has `adapter_slot`.
        """
        running = self.scheduler.running
        self._adapter_slots[row] = adapter_slot if request is None else request.adapter_slot
        bias: list[tuple[int, float]] = []
        if request is not None:
            request.cached_tokens = int(running.cached_tokens[row])
            # Stops come last, so that a step of a row that holds none back counts only what is before them.
            bias = [*request.params.logit_bias.items(), *((token, -np.inf) for token in request.held_back_stops)]
            self._table.assign(row, request)
        self._set_request(row, running.known_tokens(row, 0, int(running.num_known[row])), bias)

    def most_burst_steps(self) -> int:
        """How many steps the running requests may make in a row without the host."""
        rows = np.flatnonzero(self.scheduler.residency.request_map.live & ~self.scheduler.running.held)
        return MAX_BURST_STEPS if self.burst_s and self._table.are_plain(rows) else 1

    def dispatch(self, plan: StepPlan) -> DispatchedStep:
        """Start a step, or a burst of them, on the device; returns at once where the backend runs asynchronously."""
        return self.choose(plan, self.forward(plan)) if plan.steps == 1 else self._burst(plan)

    def awaits_tokens(self, plan: StepPlan) -> bool:
        """Whether the choices of `plan` depend on tokens that the host has to know first."""
        return self._table.constrains(plan.rows[plan.samples])

    def forward(self, plan: StepPlan) -> jax.Array:
        """Start the network of a step, for `choose` to go on from: hidden states [rows, hidden] on the device."""
        for row in plan.admitted:
            self.begin(row, self.requests[int(self.scheduler.running.request_id[row])])
        with self._network(plan, ForwardInputs) as shape:
            self.state, hidden = self.programs.forward(self.params, self.state, self._inputs.of(plan, shape))
        return hidden

    def choose(self, plan: StepPlan, hidden: jax.Array) -> DispatchedStep:
        """Start the sampler of a step whose network was started."""
        sampling = self._table.inputs(plan.rows, plan.positions, plan.samples, hidden.shape[0])
        with self._reporting_first(hidden.shape[0], type(sampling)):
            chosen = choose_tokens(self.programs, self.params, hidden, self.state.sampler, sampling)
        self.state = self.state._replace(sampler=chosen.state)
        sampled = None if isinstance(chosen, GreedyResult) else chosen.sampled
        return DispatchedStep(plan, self._awaited(chosen.token), sampled)

    def collect(self, step: DispatchedStep) -> list[TokenOutput]:
        """Wait for a step's tokens and hand them to their requests, in the order of its rows; of a burst step by step,
        up to each request's last.
        """
        padded = step.token.result()
        tokens = padded.reshape(-1, padded.shape[-1])[: step.plan.steps, : len(step.plan.rows)]
        sampled = None if step.sampled is None else Sampled(*(np.asarray(array) for array in step.sampled))
        gained = np.flatnonzero(self.scheduler.retire(step.plan, tokens)).tolist()
        requests = [self.requests[request_id] for request_id in step.plan.request_ids[gained].tolist()]
        return [
            self._accept(request, token, sampled, index)
            for of_step in tokens[:, gained].tolist()
            for request, token, index in zip(requests, of_step, gained, strict=True)
            if not request.has_ended
        ]

    def run_held(self, program: jax.stages.Wrapped, plan: StepPlan, *arguments: Any) -> jax.Array:
        """Run a step of held requests with `score` or `pool`, which returns an array beside the state."""
        self._check(plan)
        with reporting_cache_faults():
            inputs = self._inputs.of(plan, self.shape_of(plan))
            self.state, result = program(self.params, self.state, inputs, *arguments)
        self._poison_freed()
        return result

    def compiler_of(self, program: jax.stages.Wrapped, shape: StepShape, *arguments: Any) -> Callable[[], object]:
        """What compiles such a program for steps of `shape`, on any thread."""
        given = (self.params, self.state, self._inputs.of(None, shape), *arguments)

        def compile_program() -> None:
            with reporting_cache_faults():
                program.lower(*given).compile()

        return compile_program

    def _reporting_first(self, *program: object) -> contextlib.AbstractContextManager[None]:
        """Around a call of `program`, which may compile it where it is the first."""
        first = program not in self._ran
        self._ran.add(program)
        return reporting_cache_faults() if first else contextlib.nullcontext()

    def _burst(self, plan: StepPlan) -> DispatchedStep:
        with self._network(plan, BurstInputs) as shape:
            self.state, token = self.programs.burst(self.params, self.state, self._inputs.burst_of(plan, shape))
        return DispatchedStep(plan, self._awaited(token), None)

    def _awaited(self, token: jax.Array) -> Future[NDArray[np.int32]]:
        """Tokens on the host, once there are any, for which a thread begins to wait at once.

        A CPU starts a program that was queued behind this one before it wakes those who began to wait after that, and
        by its end nothing would be queued any more.
        """
        return self._waiter.submit(np.asarray, token)

    @contextlib.contextmanager
    def _network(self, plan: StepPlan, inputs: type) -> Iterator[StepShape]:
        """Around the call that starts the network of `plan`, of the program that takes such inputs."""
        shape = self.shape_of(plan)
        self._check(plan)
        with self._reporting_first(shape, inputs):
            yield shape
        self._poison_freed()
        self.counters.add(plan, shape, self.scheduler.residency.allocator.live_pages)

    def _accept(self, request: Request, token: int, sampled: Sampled | None, index: int) -> TokenOutput:
        if sampled is None or not request.params.logprobs:
            return request.accept(token, None, ())
        wanted = request.params.top_logprobs
        top = zip(sampled.top_ids[index, :wanted].tolist(), sampled.top_logprobs[index, :wanted].tolist(), strict=True)
        return request.accept(
            token, float(sampled.logprob[index]), tuple(TokenLogprob(*entry) for entry in top if entry[0] >= 0)
        )

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The shape that a step is padded to."""
        table = plan.table
        return self.buckets.shape_for(table.tokens // plan.steps, table.rows, int(table.kv_len.max()))

    def _check(self, plan: StepPlan) -> None:
        """Debug mode, before a step: prove the bookkeeping, and make the pages loud that the step has to clear."""
        if self._debug:
            plan.table.validate(self.layout.num_pages, reach=self.scheduler.residency.reach)
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

    def _set_request(self, row: int, token_ids: NDArray[np.int32], bias: Sequence[tuple[int, float]]) -> None:
        self.state = self.state._replace(sampler=set_request(self.state.sampler, row, token_ids, bias))

    def _poison(self, pages: NDArray[np.int32]) -> None:
        self.state = self.state._replace(pools=poison_pages(self.state.pools, pages, self.layout))
