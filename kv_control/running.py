"""The state of requests that hold a row, as arrays indexed by row.

`num_tokens` counts the tokens of a row that exist, the one that the device is sampling right now included;
`num_known` those whose ids have reached the host; `kv_len` those whose K/V has been written or is being written. A
row has work while its K/V is behind its tokens. The last token that a request may ever have needs no K/V, so `kv_len`
stops one short of `max_tokens_total`.
"""

import numpy as np
from numpy.typing import NDArray

from kv_control.queue import QueuedRequest

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

ON_DEVICE = -1
"""Stands for a token id that only the device knows yet."""


class RunningRequests:
    """Per-row arrays of length max_requests, and the token ids known to the host [max_requests, max_context]."""

    def __init__(self, max_requests: int, max_context: int) -> None:
        self.num_tokens = np.zeros(max_requests, np.int64)
        self.num_known = np.zeros(max_requests, np.int64)
        self.kv_len = np.zeros(max_requests, np.int64)
        self.prompt_len = np.zeros(max_requests, np.int64)
        self.max_tokens_total = np.zeros(max_requests, np.int64)
        self.priority = np.zeros(max_requests, np.int64)
        self.arrival = np.zeros(max_requests, np.int64)
        self.request_id = np.full(max_requests, -1, np.int64)
        self.held = np.zeros(max_requests, np.bool_)
        # Touched page by page by the operating system, so a long max_context costs memory only where it is used.
        self._token_ids = np.zeros((max_requests, max_context), np.int32)

    def start(self, row: int, request: QueuedRequest, *, held: bool) -> None:
        """Put `request` in `row`, nothing of it computed yet."""
        tokens = len(request.token_ids)
        self.num_tokens[row] = self.num_known[row] = tokens
        self.kv_len[row] = 0
        self.prompt_len[row] = request.prompt_len
        self.max_tokens_total[row] = request.max_tokens_total
        self.priority[row] = request.priority
        self.arrival[row] = request.arrival
        self.request_id[row] = request.request_id
        self.held[row] = held
        self._token_ids[row, :tokens] = request.token_ids

    def requeued(self, row: int) -> QueuedRequest:
        """`row` as a request that can start again, with every token that it has generated."""
        return QueuedRequest(
            request_id=int(self.request_id[row]),
            token_ids=self._token_ids[row, : self.num_known[row]].copy(),
            prompt_len=int(self.prompt_len[row]),
            max_tokens_total=int(self.max_tokens_total[row]),
            priority=int(self.priority[row]),
            arrival=int(self.arrival[row]),
        )

    def kv_goal(self, rows: Int64Array) -> Int64Array:
        """K/V length [n] that the tokens of `rows` [n] call for."""
        return np.minimum(self.num_tokens[rows], self.max_tokens_total[rows] - 1)

    def by_seniority(self, rows: Int64Array) -> Int64Array:
        """`rows` [n], highest priority first and then oldest first."""
        return rows[np.lexsort((self.arrival[rows], -self.priority[rows]))]

    def token_ids(self, rows: Int64Array, positions: Int64Array) -> Int32Array:
        """Ids [tokens] at (row, position) pairs; ON_DEVICE where the host does not know them yet."""
        return np.where(positions < self.num_known[rows], self._token_ids[rows, positions], np.int32(ON_DEVICE))

    def record(self, rows: Int64Array, positions: Int64Array, token_ids: Int32Array) -> None:
        """Token ids [n] that the device sampled for `rows` [n] at `positions` [n] have reached the host."""
        self._token_ids[rows, positions] = token_ids
        self.num_known[rows] = positions + 1
