"""The engine's thread outlives the event loop that it reports to, where the server leaves before it."""

from typing import Any

import pytest
from patience import HANG_S

from kv_serving.server.engine_loop import EngineLoop, EngineState
from models import CheckpointError


def test_a_loop_that_closes_while_it_is_told_something_ends_the_thread_in_peace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class JustClosed:
        """It was open when it was looked at."""

        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, function: object) -> None:
            raise RuntimeError("Event loop is closed")

    def load() -> Any:
        raise CheckpointError("the weights are not there")

    loop: Any = JustClosed()
    engine = EngineLoop(loop, lambda state: None)
    engine.start(load)
    assert engine._thread is not None
    engine._thread.join(HANG_S)
    assert engine.stop()
    assert engine.state is EngineState.FAILED
    assert [record.message for record in caplog.records] == ["the engine's thread has ended: the weights are not there"]
