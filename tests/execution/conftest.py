"""What the tests of several parts of the engine share."""

from collections.abc import Iterator

import jax
import pytest

from kv_control.step_plan import StepPlan
from kv_execution.runtime import DispatchedStep, PagedRuntime


@pytest.fixture
def without_optimizations() -> Iterator[None]:
    """For interpreted kernels, which are long programs and short runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every program that a runtime starts for requests."""
    steps: list[int] = []
    original = PagedRuntime.dispatch

    def counted(self: PagedRuntime, plan: StepPlan) -> DispatchedStep:
        steps.append(plan.steps)
        return original(self, plan)

    monkeypatch.setattr(PagedRuntime, "dispatch", counted)
    return steps
