"""What an engine says about itself: its plan, its counts, and the name of its cache."""

from typing import NamedTuple

from kv_common.layout import KvStorageLayoutV1
from kv_common.model_spec import ModelSpec
from kv_common.namespace import CacheNamespace
from kv_control.buckets import StepShape
from kv_execution.protocols import CausalModel
from kv_execution.runtime import PagedRuntime


class EnginePlan(NamedTuple):
    """What an engine will allocate and compile, known before it does either."""

    spec: ModelSpec
    layout: KvStorageLayoutV1
    max_context: int
    shapes: tuple[StepShape, ...]
    platform: str
    provider: str
    provider_reason: str


class EngineStats(NamedTuple):
    """Counts since the runtime was initialised; `traces` counts the programs traced since the engine was made."""

    pages_in_use: int
    peak_pages_in_use: int
    cached_pages: int
    free_pages: int
    running: int
    waiting: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    copied_pages: int
    traces: int
    shapes_used: int


def engine_stats(runtime: PagedRuntime, traces: int) -> EngineStats:
    """Counts of a running engine that has traced `traces` programs."""
    scheduler, counters = runtime.scheduler, runtime.counters
    allocator = scheduler.residency.allocator
    return EngineStats(
        pages_in_use=allocator.live_pages,
        peak_pages_in_use=counters.peak_pages_in_use,
        cached_pages=allocator.cached_pages,
        free_pages=allocator.free_pages,
        running=scheduler.residency.num_running,
        waiting=scheduler.num_waiting,
        steps=counters.steps,
        prefill_tokens=counters.prefill_tokens,
        decode_tokens=counters.decode_tokens,
        preemptions=counters.preemptions,
        copied_pages=counters.copied_pages,
        traces=traces,
        shapes_used=len(counters.shapes),
    )


def namespace_of(model: CausalModel, layout: KvStorageLayoutV1, *, prefix_cache: bool) -> CacheNamespace:
    """What the K/V of `model` in pools of `layout` is cached under, but for the tenant."""
    return CacheNamespace(
        # The fingerprint covers configuration, RoPE and compute dtype too.
        weights_fingerprint=model.fingerprint if prefix_cache else b"",
        revision="",
        model_config=(),
        rope=(),
        compute_dtype=model.spec.dtype,
        # Requests come as token ids, so what made them of a text is no part of their K/V.
        tokenizer_fingerprint=b"",
        kv_dtype=layout.dtype,
        kv_quantization="",
        layout=layout.page_geometry,
        kv_head_shards=layout.kv_head_shards,
    )


def allocation_line(layout: KvStorageLayoutV1, provider: str) -> str:
    """What an engine has allocated, for people."""
    return (
        f"paged runtime: {layout.usable_pages} pages of {layout.tokens_per_page} tokens "
        f"({layout.usable_tokens} tokens, {layout.total_pool_bytes / 2**20:.1f} MiB of {layout.dtype}), "
        f"{provider} kernels"
    )
