"""The three ways of running requests on one runtime, which may be mixed."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from kv_common.model_spec import ModelSpec
from kv_execution.adapters import AdapterChoice, Adapters
from kv_execution.batcher import Batcher
from kv_execution.embedding import Embedder
from kv_execution.held_requests import HeldRequests
from kv_execution.prompt_programs import PromptPrograms
from kv_execution.runtime import PagedRuntime


class Drivers(NamedTuple):
    """Continuous batching, requests that are moved by hand, and prompts that become vectors."""

    batcher: Batcher
    held: HeldRequests
    embedder: Embedder


def drivers_of(
    runtime: PagedRuntime,
    spec: ModelSpec,
    adapters: Adapters,
    namespace_of: Callable[[str, AdapterChoice], bytes],
    request_ids: "itertools.count[int]",
    *,
    clock: Callable[[], float],
    draw_seed: Callable[[], int],
) -> Drivers:
    """Those of a new runtime."""
    prompt_programs = PromptPrograms(runtime)
    return Drivers(
        Batcher(runtime, spec, namespace_of, adapters, request_ids, clock=clock, draw_seed=draw_seed),
        HeldRequests(runtime, spec, request_ids, prompt_programs, draw_seed=draw_seed),
        Embedder(runtime, spec, request_ids, prompt_programs),
    )
