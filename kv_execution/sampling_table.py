"""Sampling parameters of the requests that hold a row, as arrays, so that a step gathers them without a loop."""

import numpy as np
from numpy.typing import NDArray

from kv_execution.requests import Request
from kv_execution.sampling import SamplingInputs
from kv_execution.sampling_params import seed_words


class SamplingTable:
    """One entry per row of the request map, written when a request takes the row."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._columns = SamplingInputs(
            temperature=np.zeros(max_requests, np.float32),
            top_k=np.zeros(max_requests, np.int32),
            top_p=np.ones(max_requests, np.float32),
            min_p=np.zeros(max_requests, np.float32),
            repetition_penalty=np.ones(max_requests, np.float32),
            presence_penalty=np.zeros(max_requests, np.float32),
            frequency_penalty=np.zeros(max_requests, np.float32),
            seed=np.zeros((max_requests, 2), np.uint32),
            bias_count=np.zeros(max_requests, np.int32),
            prompt_len=np.zeros(max_requests, np.int32),
            position=np.zeros(max_requests, np.int32),
            history_row=np.arange(max_requests, dtype=np.int32),
            top_logprobs=np.zeros(max_requests, np.int32),
        )

    def assign(self, row: int, request: Request) -> None:
        """The request that now holds `row`."""
        params, columns = request.params, self._columns
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "top_logprobs",
        ):
            getattr(columns, name)[row] = getattr(params, name)
        columns.seed[row] = seed_words(request.seed)
        columns.bias_count[row] = len(params.logit_bias)
        columns.prompt_len[row] = request.prompt_len

    def inputs(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], samples: NDArray[np.bool_], padded_rows: int
    ) -> SamplingInputs:
        """Inputs for `rows` [n], padded to `padded_rows`; rows that do not sample, and padding, ask for nothing and
        record nothing.
        """
        asking = np.flatnonzero(samples)
        gathered = []
        for name, column in zip(SamplingInputs._fields, self._columns, strict=True):
            padded = np.zeros((padded_rows, *column.shape[1:]), column.dtype)
            if name == "history_row":
                padded[:] = self._max_requests
            elif name in ("top_p", "repetition_penalty"):
                padded[:] = 1
            padded[asking] = positions[asking] if name == "position" else column[rows[asking]]
            gathered.append(padded)
        return SamplingInputs(*gathered)
