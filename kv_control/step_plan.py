"""What the scheduler hands out: one step, or several of the same rows in a row, described for whoever runs it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_common.page_table import KvPageTableV1
from kv_control.running import Int32Array, Int64Array


class StepPlan(NamedTuple):
    """One step: what to compute, and which rows sample a token at its end.

    rows, epochs, request_ids, positions, samples: [n] in the order of `table`; `positions` is the index that the
    row's next token will have in its sequence. token_rows: [tokens]. Before anything is written the step clears
    `scrub_pages` and then copies `copy_sources` to `copy_targets`. `admitted` are rows.

    A plan of several `steps` is a burst: every row samples in each, has so many tokens in `table`, and computes them
    one after the other.
    """

    rows: Int64Array
    epochs: Int64Array
    request_ids: Int64Array
    positions: Int64Array
    samples: NDArray[np.bool_]
    token_rows: Int64Array
    table: KvPageTableV1
    scrub_pages: Int32Array
    copy_sources: Int32Array
    copy_targets: Int32Array
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    steps: int
