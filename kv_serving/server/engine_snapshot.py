"""The engine's counts between two steps, as a value that other threads can read."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kv_control.prefix_values import PrefixStatistics
    from kv_execution import EngineStats, PagedEngine


class EngineSnapshot(NamedTuple):
    """Counts of the engine and of its prefix cache."""

    stats: "EngineStats"
    prefix: "PrefixStatistics"


def snapshot_of(engine: "PagedEngine") -> EngineSnapshot:
    """Call it between steps."""
    return EngineSnapshot(engine.stats(), engine.prefix_statistics())
