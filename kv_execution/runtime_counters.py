"""What a runtime has done since it began."""

from kv_control.buckets import StepShape
from kv_control.step_plan import StepPlan


class RuntimeCounters:
    """Sums over all steps, and the shapes that they had."""

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.preemptions = 0
        self.copied_pages = 0
        self.peak_pages_in_use = 0
        self.shapes: set[StepShape] = set()

    def add(self, plan: StepPlan, shape: StepShape, pages_in_use: int) -> None:
        """The steps of `plan` were started."""
        starts = plan.table.query_start
        decodes = plan.steps * int((starts[1:] - starts[:-1] == plan.steps).sum())
        self.steps += plan.steps
        self.decode_tokens += decodes
        self.prefill_tokens += plan.table.tokens - decodes
        self.preemptions += len(plan.preempted)
        self.copied_pages += len(plan.copy_targets)
        self.shapes.add(shape)
        self.peak_pages_in_use = max(self.peak_pages_in_use, pages_in_use)
