"""Which shapes a known set of prompts will reach: what to compile where nothing else will ever run."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_control.buckets import ShapeBuckets, StepShape
from kv_control.scheduler import Scheduler
from kv_execution.sampling_params import SamplingParams


def shapes_needed(
    scheduler: Scheduler,
    buckets: ShapeBuckets,
    prompts: Sequence[NDArray[np.int32]],
    params: Sequence[SamplingParams],
    namespaces: Sequence[bytes],
) -> tuple[StepShape, ...]:
    """Shapes of the steps that `scheduler`, which is new and used up here, gives these prompts in their namespaces.

    Prefill is rehearsed, since who shares with whom decides its chunks. Of decodes every number of rows counts, since
    requests end when they will. Prompts beyond the rows there are come later, in shapes that are not foreseen.
    """
    shapes: set[StepShape] = set()
    waiting = {index: each for index, each in enumerate(params[: buckets.max_rows])}
    for index, each in waiting.items():
        scheduler.submit(index, prompts[index], max_new_tokens=each.max_tokens, namespace=namespaces[index])
    rows, longest, total = len(waiting), 0, 0
    while waiting and (plan := scheduler.schedule()) is not None:
        shapes.add(buckets.shape_for(plan.table.tokens, plan.table.rows, int(plan.table.kv_len.max())))
        gained = scheduler.retire(plan, np.zeros((1, len(plan.rows)), np.int32))
        for index in plan.request_ids[gained].tolist():
            if waiting.pop(index, None) is None:
                continue
            if params[index].max_tokens == 1:
                scheduler.finish(index)
                continue
            longest = max(longest, len(prompts[index]) + 1)
            total = max(total, min(len(prompts[index]) + params[index].max_tokens - 1, buckets.max_context))
    if total:
        last_rows = buckets.shape_for(rows, rows, longest).rows
        first, last = (buckets.shape_for(1, 1, length).max_seqlen_k for length in (longest, max(longest, total)))
        shapes.update(
            shape
            for shape in buckets.reachable()
            if shape.tokens == shape.rows <= last_rows and first <= shape.max_seqlen_k <= last
        )
    return tuple(sorted(shapes))
