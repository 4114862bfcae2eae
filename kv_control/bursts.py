"""How many steps running requests can make in a row before the host has to see to them."""

import numpy as np

from kv_control.residency import Residency
from kv_control.running import Int64Array


def burst_steps(residency: Residency, rows: Int64Array, most_steps: int) -> int:
    """Steps, at most so many, of `rows` [n], which have work; 1 where they do not all decode, or pages are short.

    No row ends within them, and none opens more than one page, which is what the shape of a step has room for.
    """
    running = residency.running
    if most_steps == 1 or not rows.size or (running.kv_goal(rows) - running.kv_len[rows] > 1).any():
        return 1
    left = running.max_tokens_total[rows] - 1 - running.kv_len[rows]
    steps = min(most_steps, residency.layout.tokens_per_page, int(left.min()))
    needed = residency.pages_needed(rows, np.full(rows.size, steps))
    return steps if int(needed.sum()) <= residency.obtainable_pages else 1
