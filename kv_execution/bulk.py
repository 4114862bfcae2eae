"""Requests in bulk: all of a list, run to their end."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_execution.batcher import Batcher
from kv_execution.config import EngineConfigError
from kv_execution.requests import GenerationResult
from kv_execution.runtime import PagedRuntime
from kv_execution.sampling_params import SamplingParams

AdapterNames = str | Sequence[str | None] | None
"""One for all prompts, or one each."""


def generate_all(
    batcher: Batcher,
    runtime: PagedRuntime,
    prompts: Sequence[Sequence[int] | NDArray[np.integer]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    adapters: AdapterNames,
) -> list[GenerationResult]:
    """See `PagedEngine.generate`."""
    count = len(prompts)
    each = [params or SamplingParams()] * count if params is None or isinstance(params, SamplingParams) else params
    names = one_each(adapters, count)
    for what, given in (("sampling parameters", len(each)), ("adapters", len(names))):
        if given != count:
            raise EngineConfigError(f"{count} prompts and {given} {what}; give one for all, or one each")
    submitted: list[int] = []
    try:
        for prompt, prompt_params, name in zip(prompts, each, names, strict=True):
            submitted.append(batcher.submit(prompt, prompt_params, adapter=name))
        outputs = [runtime.requests[request_id].outputs for request_id in submitted]
        batcher.run_to_end(submitted)
    finally:
        for request_id in submitted:
            batcher.abort(request_id)
    return [GenerationResult.of(tokens) for tokens in outputs]


def one_each(adapters: AdapterNames, count: int) -> Sequence[str | None]:
    """An adapter's name for each of so many prompts, of one for all or one each."""
    return [adapters] * count if adapters is None or isinstance(adapters, str) else adapters
