"""The arrays that a step hands to the device, padded to the shape of its program.

They stay apart, and in numpy: bringing a small array to a CPU device costs a jitted call a fraction of a microsecond,
so packing them into one would only hide which is which.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1
from kv_control.buckets import StepShape, page_entries, scrub_entries
from kv_control.step_plan import StepPlan
from kv_execution.step_values import MAX_BURST_STEPS, BurstInputs, ForwardInputs
from kv_kernels.adapters import NO_ADAPTER
from kv_kernels.provider import KernelProvider, PlanShape


class StepInputs:
    """Builds `ForwardInputs`; `max_rows` is one past the last row of the token histories.

    `adapter_slots` [max_rows] i32 is kept by the caller: the adapter of each row; None where there are no adapters.
    """

    def __init__(
        self,
        provider: KernelProvider,
        layout: KvStorageLayoutV1,
        max_rows: int,
        adapter_slots: NDArray[np.int32] | None,
    ) -> None:
        self._provider = provider
        self._layout = layout
        self._max_rows = max_rows
        self._adapter_slots = adapter_slots
        self._paddings: dict[StepShape, ForwardInputs] = {}

    def of(self, plan: StepPlan | None, shape: StepShape) -> ForwardInputs:
        """The step of `plan` padded to `shape`; of padding alone where there is no plan."""
        padding = self._paddings.get(shape)
        if padding is None:
            padding = self._paddings[shape] = self._padding(shape)
        if plan is None:
            return padding
        table = plan.table
        return ForwardInputs(
            token_rows=_over(padding.token_rows, plan.token_rows),
            positions=_over(padding.positions, table.positions),
            slots=_over(padding.slots, table.write_slots),
            scrub_pages=_over(padding.scrub_pages, plan.scrub_pages),
            copy_sources=_over(padding.copy_sources, plan.copy_sources),
            copy_targets=_over(padding.copy_targets, plan.copy_targets),
            logit_rows=_over(padding.logit_rows, table.query_start[1:] - 1),
            plan=self._provider.plan(table, self._plan_shape(shape)),
            adapter_slots=None
            if self._adapter_slots is None
            else _over(padding.adapter_slots, self._adapter_slots[plan.token_rows]),
        )

    def can_burst(self, shape: StepShape) -> bool:
        """Whether the provider needs no plan of its own for every step of a burst."""
        return self._provider.later(self.of(None, shape).plan, 0) is not None

    def burst_of(self, plan: StepPlan | None, shape: StepShape) -> BurstInputs:
        """The burst of `plan`, whose steps are of `shape`; of no steps where there is no plan."""
        padding = self.of(None, shape)
        slots = np.tile(padding.slots, (MAX_BURST_STEPS, 1))
        if plan is None:
            return BurstInputs(padding, slots, np.int32(0))
        table, steps = plan.table, plan.steps
        slots[:steps, : table.rows] = table.write_slots.reshape(-1, steps).T
        first = replace(
            table,
            write_slots=table.write_slots[::steps],
            positions=table.positions[::steps],
            query_start=np.arange(table.rows + 1, dtype=np.int32),
            kv_len=table.kv_len - np.int32(steps - 1),
        )
        return BurstInputs(self.of(plan._replace(table=first, token_rows=plan.rows), shape), slots, np.int32(steps))

    def _padding(self, shape: StepShape) -> ForwardInputs:
        tokens_per_page = self._layout.tokens_per_page
        return ForwardInputs(
            token_rows=np.full(shape.tokens, self._max_rows, np.int32),
            positions=np.zeros(shape.tokens, np.int32),
            slots=np.arange(shape.tokens, dtype=np.int32) % tokens_per_page,
            scrub_pages=np.full(scrub_entries(shape, tokens_per_page), -1, np.int32),
            copy_sources=np.zeros(shape.rows, np.int32),
            copy_targets=np.full(shape.rows, -1, np.int32),
            logit_rows=np.zeros(shape.rows, np.int32),
            plan=self._provider.plan(_empty_table(tokens_per_page), self._plan_shape(shape)),
            adapter_slots=None if self._adapter_slots is None else np.full(shape.tokens, NO_ADAPTER, np.int32),
        )

    def _plan_shape(self, shape: StepShape) -> PlanShape:
        return PlanShape(shape.tokens, shape.rows, page_entries(shape, self._layout.tokens_per_page))


def _over(padding: NDArray[np.int32], values: NDArray[np.integer]) -> NDArray[np.int32]:
    if not len(values):
        return padding
    filled = padding.copy()
    filled[: len(values)] = values
    return filled


def _empty_table(tokens_per_page: int) -> KvPageTableV1:
    none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return KvPageTableV1(none, none, start, start, none, none, none, tokens_per_page)
