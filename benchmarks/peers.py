"""The engines that stand side by side, each reduced to one operation: run these requests, and say when tokens came.

A peer is imported and built inside its own constructor, so that a process holds one engine alone and one that is not
installed is an ImportError here and a line in the report. Each is given what it is best at: its own batching, its own
kind of shared prefix, greedy tokens, no end of sequence, and the same number of threads. Requests are submitted all at
once; times are seconds from that moment to when the token is in the caller's hands.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from workloads import TraceRequest, Workload

from kv_common.errors import JaxkvError

BATCH_TOKENS = 512
MAX_REQUESTS = 32
MAX_CONTEXT = 2304
KV_TOKENS = 16384


class Timeline(NamedTuple):
    """Seconds from submission of each token of each request, and each request's first token."""

    token_s: tuple[tuple[float, ...], ...]
    first_tokens: tuple[int, ...]


class PeerError(JaxkvError):
    """A peer that is there but does not do what is asked of it."""


class Peer(Protocol):
    """An engine with its model loaded."""

    about: dict[str, Any]
    """Its version, and how it holds weights and K/V."""

    def run(self, workload: Workload) -> Timeline:
        """Every request to its end, after the primer, whose time does not count."""


def shared_tokens(workload: Workload) -> int:
    """Tokens that all requests (and the primer) begin with, short of a whole prompt; 0 where that is not worth it."""
    prompts = [request.prompt for request in (*workload.requests, *workload.primer)]
    if len(prompts) < 2:
        return 0
    longest = min(len(request.prompt) for request in workload.requests) - 1
    columns = zip(*prompts, strict=False)
    same = next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(map(len, prompts)))
    return min(same, longest) if same >= 32 else 0


class Clock:
    """Notes tokens as they come; starts when it is made."""

    def __init__(self, requests: int) -> None:
        self._token_s: list[list[float]] = [[] for _ in range(requests)]
        self._first = [-1] * requests
        self._start = time.perf_counter()

    def note(self, request: int, token: int, tokens: int = 1) -> None:
        """`tokens` of `request` have come by now, of which `token` is the first."""
        if not self._token_s[request]:
            self._first[request] = token
        self._token_s[request] += [time.perf_counter() - self._start] * tokens

    def has_begun(self, request: int) -> bool:
        """Whether a token of `request` has come."""
        return bool(self._token_s[request])

    def timeline(self) -> Timeline:
        """Everything noted."""
        return Timeline(tuple(map(tuple, self._token_s)), tuple(self._first))


class Jaxkv:
    """This engine: as a server would set it up, or no larger than a workload needs, as `jaxkv generate` does."""

    def __init__(
        self, path: Path, *, kv: str, dtype: str = "float32", int8: bool = False, only: Workload | None = None
    ) -> None:
        import jax
        import jax.numpy as jnp

        from kv_common import __version__
        from kv_execution import EngineConfig, PagedEngine
        from kv_kernels.selection import ProviderError
        from models import load_model

        model = load_model(path, dtype=dtype)
        spec = model.spec
        rows, step_tokens, context, kv_tokens = MAX_REQUESTS, BATCH_TOKENS, MAX_CONTEXT, KV_TOKENS
        if only is not None:
            rows, context = len(only.requests), only.longest_context
            step_tokens = min(step_tokens, sum(len(request.prompt) for request in only.requests))
            kv_tokens = max(1024, 2 * rows * context)
        config = EngineConfig(
            kv_pool_bytes=kv_tokens * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * jnp.dtype(kv).itemsize,
            kv_dtype=kv,
            max_requests=rows,
            max_step_tokens=step_tokens,
            max_context=min(context, spec.max_context),
            int8_activations=int8,
        )
        try:
            engine = PagedEngine(model, config)
        except ProviderError as error:  # not every CPU gains by what an arm asks for
            raise PeerError(str(error)) from None
        plan = engine.init_paged_runtime()
        if only is None:
            shapes = engine.warmup_paged()
        else:
            requests = [*only.primer, *only.requests]
            prompts, params = [request.prompt for request in requests], list(map(_params, requests))
            shapes = engine.warmup_paged(shapes=engine.shapes_needed(prompts, params), params=params)
        self._batcher = engine.batcher()
        self.about = {
            "version": __version__,
            "jax": jax.__version__,
            "kernels": plan.provider,
            "kv": kv,
            "shapes": len(shapes),
            "parameter_bytes": spec.parameter_bytes,
            "pool_bytes": plan.layout.total_pool_bytes,
        }

    def run(self, workload: Workload) -> Timeline:
        if workload.primer:
            self._run(workload.primer)
        return self._run(workload.requests)

    def _run(self, requests: Sequence[TraceRequest]) -> Timeline:
        clock = Clock(len(requests))
        index_of = {
            self._batcher.submit(request.prompt, _params(request)): index for index, request in enumerate(requests)
        }
        while self._batcher.has_unfinished:
            for output in self._batcher.step():
                assert output.token is not None  # no request here has a deadline
                clock.note(index_of[output.request_id], output.token)
        return clock.timeline()


def _params(request: TraceRequest) -> Any:
    from kv_execution import SamplingParams

    return SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)


class OpenVino:
    """openvino-genai's continuous batching, on a GGUF file that it converts as it loads."""

    def __init__(self, path: Path, *, threads: int, precision: str | None = None, kv: str | None = None) -> None:
        """`precision` of activations and `kv` of the cache: its names for a type, or None for its own choice."""
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.max_num_seqs = MAX_REQUESTS
        scheduler.cache_size = 1  # GiB
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = precision
        if kv is not None:
            properties["KV_CACHE_PRECISION"] = kv
        self._tensor, self._config = openvino.Tensor, openvino_genai.GenerationConfig
        try:
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise PeerError(f"openvino-genai cannot load {path.name} ({reason}): give a GGUF file it reads") from None
        self._ids = itertools.count()
        self.about = {"version": openvino_genai.__version__, "activations": precision, "kv": kv}

    def run(self, workload: Workload) -> Timeline:
        if workload.primer:
            self._run(workload.primer, ahead=0)
        # Its cache holds what has been computed, not what is being computed: what all begin with has to come first.
        return self._run(workload.requests, ahead=1 if shared_tokens(workload) and not workload.primer else 0)

    def _run(self, requests: Sequence[TraceRequest], ahead: int) -> Timeline:
        """The first `ahead` requests get their first tokens before the others are added; the clock starts with them."""
        clock = Clock(len(requests))
        handles = [self._add(request) for request in requests[:ahead]]
        while ahead and not clock.has_begun(ahead - 1):
            self._step(handles, clock)
        handles += [self._add(request) for request in requests[ahead:]]
        while self._pipeline.has_non_finished_requests():
            self._step(handles, clock)
        return clock.timeline()

    def _add(self, request: TraceRequest) -> Any:
        config = self._config(max_new_tokens=request.max_tokens, ignore_eos=True, do_sample=False)
        return self._pipeline.add_request(next(self._ids), self._tensor(np.array([request.prompt], np.int64)), config)

    def _step(self, handles: Sequence[Any], clock: Clock) -> None:
        self._pipeline.step()
        for index, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    if output.generated_ids:
                        clock.note(index, output.generated_ids[0], len(output.generated_ids))
