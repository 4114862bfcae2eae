"""The state of requests that hold a row, as arrays indexed by row.

`num_tokens` counts the tokens of a row that exist, the one that the device is sampling right now included; `num_known`
those whose ids have reached the host; `kv_len` those whose K/V has been written or is being written. A row has work
while its K/V is behind its tokens. The last token that a request may ever have needs no K/V, so `kv_len` stops one
short of `max_tokens_total`. `cached_tokens` is what `kv_len` began with.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kv_control.queue import QueuedRequest

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]


class RunningRequests:
    """Per-row arrays of length max_requests, and the token ids known to the host [max_requests, max_context]."""

    def __init__(self, max_requests: int, max_context: int) -> None:
        self.num_tokens = np.zeros(max_requests, np.int64)
        self.num_known = np.zeros(max_requests, np.int64)
        self.kv_len = np.zeros(max_requests, np.int64)
        self.cached_tokens = np.zeros(max_requests, np.int64)
        self.prompt_len = np.zeros(max_requests, np.int64)
        self.max_tokens_total = np.zeros(max_requests, np.int64)
        self.priority = np.zeros(max_requests, np.int64)
        self.senior_turn = np.zeros(max_requests, np.int64)
        self.senior_order = np.zeros(max_requests, np.int64)
        self.request_id = np.full(max_requests, -1, np.int64)
        self.held = np.zeros(max_requests, np.bool_)
        self._request: list[QueuedRequest | None] = [None] * max_requests
        # Touched page by page by the operating system, so a long max_context costs memory only where it is used.
        self._token_ids = np.zeros((max_requests, max_context), np.int32)

    def start(self, row: int, request: QueuedRequest, *, kv_len: int, held: bool) -> None:
        """Put `request` in `row`, with the K/V of its first `kv_len` tokens in pages that it shares."""
        tokens = len(request.token_ids)
        self.num_tokens[row] = self.num_known[row] = tokens
        self.kv_len[row] = self.cached_tokens[row] = kv_len
        self.prompt_len[row] = request.prompt_len
        self.max_tokens_total[row] = request.max_tokens_total
        self.priority[row] = request.priority
        self.senior_turn[row], self.senior_order[row] = request.seniority
        self.request_id[row] = request.request_id
        self.held[row] = held
        self._request[row] = request
        self._token_ids[row, :tokens] = request.token_ids

    def requeued(self, row: int) -> QueuedRequest:
        """`row` as a request that can start again, with every token that it has generated."""
        request = self._request[row]
        assert request is not None
        return replace(request, token_ids=self._token_ids[row, : self.num_known[row]].copy(), parent=None)

    def kv_goal(self, rows: Int64Array) -> Int64Array:
        """K/V length [n] that the tokens of `rows` [n] call for."""
        return np.minimum(self.num_tokens[rows], self.max_tokens_total[rows] - 1)

    def by_seniority(self, rows: Int64Array) -> Int64Array:
        """`rows` [n], most senior first."""
        return rows[np.lexsort((self.senior_order[rows], self.senior_turn[rows]))]

    def known_tokens(self, row: int, start: int, end: int) -> Int32Array:
        """Token ids [end - start] of `row`, all of which the host knows."""
        return self._token_ids[row, start:end]

    def record(self, rows: Int64Array, positions: Int64Array, token_ids: Int32Array) -> None:
        """Token ids [steps, n] that the device sampled for `rows` [n] from `positions` [n] on have reached the host."""
        steps = len(token_ids)
        self._token_ids[rows, positions + np.arange(steps)[:, None]] = token_ids
        self.num_known[rows] = positions + steps
