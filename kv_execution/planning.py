"""What a model and a configuration come to: the pools' layout, the shapes of steps, the kernels. Allocates nothing."""

from typing import NamedTuple

from kv_common.layout import MAX_SLOTS, KvStorageLayoutV1, layout_for_budget
from kv_common.model_spec import ModelSpec
from kv_control.buckets import ShapeBuckets
from kv_control.scheduler import Scheduler
from kv_execution.config import EngineConfig, EngineConfigError
from kv_execution.protocols import CausalModel
from kv_kernels.provider import KernelNeeds
from kv_kernels.selection import ChosenProvider, choose_provider, current_platform


class Planned(NamedTuple):
    """Decided once, when an engine is made."""

    layout: KvStorageLayoutV1
    max_context: int
    buckets: ShapeBuckets
    platform: str
    chosen: ChosenProvider


def plan_for(model: CausalModel, config: EngineConfig) -> Planned:
    """Raises EngineConfigError, LayoutError or ProviderError."""
    spec = model.spec
    if (config.max_context or spec.max_context) > MAX_SLOTS:
        raise EngineConfigError(
            f"{spec.name} says it takes {spec.max_context} tokens, more than int32 can number; set max_context"
        )
    if config.max_context is not None and config.max_context > spec.max_context:
        raise EngineConfigError(
            f"max_context {config.max_context} is beyond the {spec.max_context} tokens that {spec.name} was loaded "
            "for; lower it"
        )
    width = 1 if model.tensor_mesh is None else model.tensor_mesh.width
    layout = layout_for_budget(
        pool_bytes=config.kv_pool_bytes,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        tokens_per_page=config.tokens_per_page,
        dtype=config.kv_dtype or spec.dtype,
        kv_head_shards=width,
    )
    needs = KernelNeeds(
        platform=current_platform(),
        kv_dtype=layout.dtype,
        num_heads=spec.num_heads // width,
        num_kv_heads=layout.heads_per_shard,
        head_dim=spec.head_dim,
        tokens_per_page=config.tokens_per_page,
        window=spec.attention_window,
        soft_cap=spec.attention_soft_cap,
        int8_activations=config.int8_activations,
    )
    max_context = config.max_context or spec.max_context
    # No request is longer than the pool, but where pages behind a window are given back.
    longest = max_context if spec.attention_reach else min(max_context, layout.usable_tokens + 1)
    buckets = ShapeBuckets(config.max_requests, config.max_step_tokens, longest)
    return Planned(layout, max_context, buckets, needs.platform, choose_provider(needs, config.provider))


def scheduler_for(planned: Planned, spec: ModelSpec, config: EngineConfig) -> Scheduler:
    """A scheduler with nothing in it."""
    return Scheduler(
        planned.layout,
        max_requests=config.max_requests,
        max_step_tokens=config.max_step_tokens,
        max_context=planned.max_context,
        max_waiting=config.max_waiting,
        reach=spec.attention_reach,
        prefix_cache=config.prefix_cache,
        longest_prefix_first=config.longest_prefix_first,
    )
