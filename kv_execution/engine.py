"""The engine: what a user holds. It plans memory and shapes, owns the runtime, and offers two ways of running requests.

By hand, with handles: `prefill_paged`, `generate_paged`, `release`; pages stay with a handle until it is released. Or
in bulk: `batcher` for continuous batching, `generate` for a list. Both share one runtime, so they may be mixed.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_control.buckets import StepShape
from kv_control.key_changes import KeyChanges
from kv_control.prefix_values import PrefixStatistics
from kv_control.request_map import RequestHandle
from kv_execution.adapters import AdapterChoice, Adapters
from kv_execution.batcher import Batcher, checked_prompt
from kv_execution.bulk import AdapterNames, generate_all, one_each
from kv_execution.compilation_cache import use_compilation_cache
from kv_execution.config import EngineConfig, EngineConfigError
from kv_execution.drivers import Drivers, drivers_of
from kv_execution.embedding import SCORES
from kv_execution.engine_values import EnginePlan, EngineStats, allocation_line, engine_stats, namespace_of
from kv_execution.held_requests import PrefillResult, TokenIds
from kv_execution.needed_shapes import shapes_needed
from kv_execution.planning import plan_for, scheduler_for
from kv_execution.processes import agreed_clock, seed_source
from kv_execution.prompt_programs import CompileBeside
from kv_execution.protocols import CausalModel
from kv_execution.requests import GenerationResult, TokenOutput
from kv_execution.runtime import PagedRuntime
from kv_execution.sampler_programs import samplers_for
from kv_execution.sampling_params import SamplingParams
from kv_execution.step import build_step_programs

logger = logging.getLogger(__name__)


class NotInitializedError(JaxkvError):
    """The runtime is used before `init_paged_runtime`."""


class PagedEngine:
    """A model on a paged K/V cache. Not thread-safe: one thread drives an engine."""

    def __init__(
        self, model: CausalModel, config: EngineConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Plan for `model`; nothing is allocated yet. `clock` gives the seconds that deadlines are measured in.

        Raises EngineConfigError, LayoutError, ProviderError or TensorParallelError.
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise EngineConfigError(f"config is a {type(config).__name__}; give EngineConfig(...)")
        self.config = config = config or EngineConfig()
        if config.tensor_parallel not in (None, 1 if model.tensor_mesh is None else model.tensor_mesh.width):
            model = model.spread(config.tensor_parallel)
        self.model = model
        self._planned = plan_for(model, config)
        self._layout, self._buckets = self._planned.layout, self._planned.buckets
        if config.compilation_cache:
            use_compilation_cache()
        adapted = model.with_adapters(config.max_adapters, config.max_adapter_rank) if config.max_adapters else None
        self._params = model.params if adapted is None else adapted.params
        self.adapters = Adapters(adapted, self._adapter_slots_in_use, self._take_params)
        self._traces = 0
        self._programs = build_step_programs(
            model if adapted is None else adapted,
            self._planned.chosen.provider,
            self._layout,
            unroll_layers=config.unroll_layers,
            adapters=None if adapted is None else adapted.capacity,
            on_trace=self._count_trace,
        )
        self._runtime: PagedRuntime | None = None
        self._drivers: Drivers | None = None
        self._request_ids = itertools.count()
        self._clock = agreed_clock(clock, model.tensor_mesh)
        self._draw_seed = seed_source(model.tensor_mesh)

    def describe(self) -> EnginePlan:
        """What the engine allocates and compiles."""
        return EnginePlan(
            spec=self.model.spec,
            layout=self._layout,
            max_context=self._planned.max_context,
            shapes=self._buckets.reachable(),
            platform=self._planned.platform,
            provider=self._planned.chosen.provider.name,
            provider_reason=self._planned.chosen.reason,
        )

    def init_paged_runtime(self) -> EnginePlan:
        """Allocate pools, page map and device state, and say what was allocated.

        A second call starts afresh; what is compiled stays.
        """
        layout, config = self._layout, self.config
        self._runtime = self._drivers = None  # the old pools go before the new ones come
        self._runtime = PagedRuntime(
            self._params,
            self._planned.chosen.provider,
            self._programs,
            scheduler_for(self._planned, self.model.spec, config),
            self._buckets,
            self.model.spec.vocab_size,
            mesh=self.model.tensor_mesh,
            has_adapters=config.max_adapters > 0,
            burst_s=config.burst_s,
            debug=config.debug,
        )
        self._namespace = namespace_of(self.model, layout, prefix_cache=config.prefix_cache)
        self._drivers = drivers_of(
            *(self._runtime, self.model.spec, self.adapters, self._namespace_of, self._request_ids),
            clock=self._clock,
            draw_seed=self._draw_seed,
        )
        logger.info(allocation_line(layout, self._planned.chosen.provider.name))
        return self.describe()

    def warmup_paged(
        self,
        progress: Callable[[int, StepShape], None] | None = None,
        *,
        shapes: Sequence[StepShape] | None = None,
        params: Sequence[SamplingParams] | None = None,
        constrained: bool = False,
    ) -> tuple[StepShape, ...]:
        """Compile `shapes`, or every shape that a step can have, and return them; `progress(done, shape)` is called
        before each. `params` are all that will be used; without them, any may be. `constrained`: and constraints too.
        """
        shapes = self._buckets.reachable() if shapes is None else tuple(shapes)
        if self.model.spec.num_labels is not None:
            self._require_drivers().embedder.warm_up(shapes, progress)
            return shapes
        plain = (True, False) if params is None else {each.is_plain for each in params}
        self._require_runtime().warm_up(shapes, progress, samplers=samplers_for(plain, constrained))
        return shapes

    def shapes_needed(
        self, prompts: Sequence[TokenIds], params: Sequence[SamplingParams], *, adapters: AdapterNames = None
    ) -> tuple[StepShape, ...]:
        """The shapes that `prompts` alone will reach, for `warmup_paged`; `params` are one per prompt, `adapters` as in
        `generate`. Raises PromptError, AdapterNameError, RequestTooLargeError or QueueFullError where that would.
        """
        checked = [checked_prompt(prompt, self.model.spec.vocab_size) for prompt in prompts]
        apart = [self.adapters.choice(name).fingerprint or b"" for name in one_each(adapters, len(prompts))]
        scheduler = scheduler_for(self._planned, self.model.spec, self.config)
        return shapes_needed(scheduler, self._buckets, checked, params, apart)

    def prefill_paged(
        self,
        token_ids: TokenIds,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> PrefillResult:
        """Compute a prompt's K/V and its first token; other requests stand still meanwhile.

        Requests share cached pages only under the same `cache_salt` and with the same adapter.

        Raises PromptError, SamplingParamsError, AdapterNameError, RequestTooLargeError, NoFreeRowError,
        OutOfPagesError, or NanLogitsError; nothing is held then.
        """
        held, choice = self._require_drivers().held, self.adapters.choice(adapter)
        return held.prefill(token_ids, params or SamplingParams(), self._namespace_of(cache_salt, choice), choice.slot)

    def generate_paged(self) -> dict[RequestHandle, TokenOutput]:
        """One more token for every held request that has not finished.

        Raises OutOfPagesError, with nothing changed, where their next tokens do not all fit: release a handle then.
        """
        return self._require_drivers().held.generate()

    def release(self, handle: RequestHandle) -> None:
        """Free a held request's row and pages. Raises StaleHandleError where it was released before."""
        self._require_drivers().held.release(handle)

    def batcher(self) -> Batcher:
        """The engine's queue for continuous batching."""
        return self._require_drivers().batcher

    def generate(
        self,
        prompts: Sequence[TokenIds],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: AdapterNames = None,
    ) -> list[GenerationResult]:
        """Run every prompt to its end; results are in the order of the prompts. `params` and `adapters` are one for
        all, or one per prompt. Raises what `Batcher.submit` raises, before anything has run.
        """
        return generate_all(self.batcher(), self._require_runtime(), prompts, params, adapters)

    def embed(
        self, prompts: Sequence[TokenIds], *, pooling: str = "mean", normalize: bool = True, adapter: str | None = None
    ) -> NDArray[np.float32]:
        """The final hidden states of each prompt, pooled: [prompts, hidden] f32, of length 1 where `normalize` is set.

        `pooling`: "mean" of all tokens, "last" token, or first ("cls"). Compiles its own programs. Raises
        EmbeddingError for another, and what `prefill_paged` raises.
        """
        steps = self.embed_steps(prompts, pooling=pooling, normalize=normalize, adapter=adapter)
        return np.concatenate([self._require_drivers().embedder.none(pooling), *steps])

    def embed_steps(
        self,
        prompts: Sequence[TokenIds],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        cache_salt: str = "",
        adapter: str | None = None,
        beside: CompileBeside | None = None,
    ) -> Iterator[NDArray[np.float32]]:
        """`embed`, or for "scores" `classify`, step by step in parts [prompts that have ended, hidden or labels]; other
        requests may go on between two. `beside`: compiles missing programs; parts are empty until they are there.
        """
        embedder, choice = self._require_drivers().embedder, self.adapters.choice(adapter)
        return embedder.steps(prompts, pooling, self._namespace_of(cache_salt, choice), choice.slot, normalize, beside)

    def classify(self, prompts: Sequence[TokenIds], *, adapter: str | None = None) -> NDArray[np.float32]:
        """A classifier's or reward model's scores of each prompt, by its last token: [prompts, labels] f32, unscaled.

        Raises EmbeddingError for a model without such a head, and what `embed` raises.
        """
        return self.embed(prompts, pooling=SCORES, adapter=adapter)

    def score(self, token_ids: TokenIds, *, adapter: str | None = None) -> NDArray[np.float32]:
        """Log-probabilities [tokens, vocab] of what follows each token. Raises what `prefill_paged` raises."""
        return np.concatenate(list(self.score_steps(token_ids, adapter=adapter)))

    def score_steps(
        self,
        token_ids: TokenIds,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
        beside: CompileBeside | None = None,
    ) -> Iterator[NDArray[np.float32]]:
        """`score` step by step, in parts [tokens of the step, vocab]; see `embed_steps`."""
        held, choice = self._require_drivers().held, self.adapters.choice(adapter)
        return held.score(token_ids, self._namespace_of(cache_salt, choice), choice.slot, beside)

    def stats(self) -> EngineStats:
        """Counts of the running engine."""
        return engine_stats(self._require_runtime(), self._traces)

    def prefix_statistics(self) -> PrefixStatistics:
        """Hits, misses by reason, and evictions of the prefix cache."""
        return self._require_runtime().scheduler.residency.trie.statistics

    def prefix_changes(self) -> KeyChanges:
        """Keys of pages that came to the prefix cache and left it since the last call; the first tells all."""
        return self._require_runtime().scheduler.residency.trie.take_changes()

    def prefix_keys(self, token_ids: TokenIds, *, cache_salt: str = "", adapter: str | None = None) -> list[bytes]:
        """Keys of a prompt's full pages in the prefix cache, for any thread. Raises PromptError, AdapterNameError."""
        namespace = self._namespace_of(cache_salt, self.adapters.choice(adapter))
        trie = (self._runtime or self._require_runtime()).scheduler.residency.trie  # in the middle of a step, too
        return trie.page_keys(namespace, checked_prompt(token_ids, self.model.spec.vocab_size))

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix and return how many pages that freed; running requests keep theirs."""
        return len(self._require_runtime().scheduler.residency.trie.reset())

    def _namespace_of(self, cache_salt: str, adapter: AdapterChoice) -> bytes:
        return dataclasses.replace(self._namespace, tenant=cache_salt, adapter_fingerprint=adapter.fingerprint).digest()

    def _adapter_slots_in_use(self) -> set[int]:
        return set() if self._runtime is None else {each.adapter_slot for each in self._runtime.requests.values()}

    def _take_params(self, params: Any) -> None:
        self._params = params
        if self._runtime is not None:
            self._runtime.params = params

    def _count_trace(self) -> None:
        self._traces += 1

    def _require_runtime(self) -> PagedRuntime:
        if self._runtime is None:
            raise NotInitializedError("the engine has no runtime yet; call init_paged_runtime() first")
        self._runtime.require_sound()
        return self._runtime

    def _require_drivers(self) -> Drivers:
        self._require_runtime()
        assert self._drivers is not None
        return self._drivers
