"""How many programs XLA compiled, as jax reports it: whoever asked for them, so that nothing hides from the count."""

from __future__ import annotations

from types import TracebackType

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts compilations while it is entered; `count` stays readable afterwards."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == COMPILE_EVENT
