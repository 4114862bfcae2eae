"""The programs over whole prompts, `score` and `pool`, which are compiled when a step first needs them.

Contract: who gives a `compile_beside` is never held up by a compiler: the step is not run, and None comes back, until
its program is there. Without it a program compiles where it runs.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from kv_control.buckets import StepShape
from kv_control.step_plan import StepPlan
from kv_execution.runtime import PagedRuntime

CompileBeside = Callable[[Callable[[], object]], "Future[Any]"]
"""Has another thread call a function, as `Executor.submit` does."""


class PromptPrograms:
    """Runs steps of held requests on one runtime; each is all or nothing, see `PagedRuntime.step`."""

    def __init__(self, runtime: PagedRuntime) -> None:
        self._runtime = runtime
        self._compiling: dict[tuple[jax.stages.Wrapped, StepShape], Future[Any]] = {}

    def score(self, rows: NDArray[np.int64], beside: CompileBeside | None) -> NDArray[np.float32] | None:
        """The next step of the held `rows` [n]: log-probabilities [tokens, vocab] of what follows each of its tokens.
        Raises what the compiler raises.
        """
        program = self._runtime.programs.score
        if not self._is_there(program, rows, lambda shape: (), beside):
            return None
        with self._runtime.step():
            plan = self._runtime.scheduler.schedule_held(rows)
            return np.asarray(self._runtime.run_held(program, plan))[: plan.table.tokens]

    def pool(
        self,
        rows: NDArray[np.int64],
        weights_of: Callable[[StepPlan], NDArray[np.float32]],
        sums: jax.Array,
        beside: CompileBeside | None,
    ) -> jax.Array | None:
        """The next step of the held `rows` [n]: `sums` with the hidden states of its tokens, each times its weight
        [tokens] and in its row. Raises what the compiler raises.
        """
        program = self._runtime.programs.pool
        if not self._is_there(program, rows, lambda shape: (_no_weights(shape), sums), beside):
            return None
        with self._runtime.step():
            plan = self._runtime.scheduler.schedule_held(rows)
            padded = _no_weights(self._runtime.shape_of(plan))
            padded[: plan.table.tokens] = weights_of(plan)
            return self._runtime.run_held(program, plan, padded, sums)

    def compile_pool(self, shape: StepShape, sums: jax.Array) -> None:
        """Compile `pool` for steps of `shape`, here and now."""
        self._runtime.compiler_of(self._runtime.programs.pool, shape, _no_weights(shape), sums)()

    def _is_there(
        self,
        program: jax.stages.Wrapped,
        rows: NDArray[np.int64],
        arguments: Callable[[StepShape], tuple[Any, ...]],
        beside: CompileBeside | None,
    ) -> bool:
        if beside is None:
            return True
        scheduler = self._runtime.scheduler
        granted = scheduler.next_held(rows)
        longest = int((scheduler.running.kv_len[granted.rows] + granted.tokens).max())
        shape = self._runtime.buckets.shape_for(int(granted.tokens.sum()), len(granted.rows), longest)
        compiling = self._compiling.get((program, shape))
        if compiling is None:
            compiling = beside(self._runtime.compiler_of(program, shape, *arguments(shape)))
            self._compiling[program, shape] = compiling
        if not compiling.done():
            return False
        if compiling.exception() is not None:
            del self._compiling[program, shape]  # whoever comes next may try again
        compiling.result()
        return True


def _no_weights(shape: StepShape) -> NDArray[np.float32]:
    return np.zeros(shape.tokens, np.float32)
