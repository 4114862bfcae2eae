"""Sampling parameters of the requests that hold a row, as arrays, so that a step gathers them without a loop."""

import numpy as np
from numpy.typing import NDArray

from kv_execution.constraints import EVERY_TOKEN, TokenConstraint
from kv_execution.requests import Request
from kv_execution.sampling import ConstrainedInputs, GreedyInputs, SamplingInputs, StepSampling
from kv_execution.sampling_params import seed_words


class SamplingTable:
    """One entry per row of the request map, written when a request takes the row."""

    def __init__(self, max_requests: int, vocab_size: int) -> None:
        self._max_requests = max_requests
        self._mask_words = -(-vocab_size // 32)
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
            logprobs=np.zeros(max_requests, np.bool_),
            top_logprobs=np.zeros(max_requests, np.int32),
        )
        self._plain = np.ones(max_requests, np.bool_)
        self._constraints: list[TokenConstraint | None] = [None] * max_requests
        self._held_back_stops = np.zeros(max_requests, np.int32)
        self._stops_from = np.zeros(max_requests, np.int64)

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
            "logprobs",
            "top_logprobs",
        ):
            getattr(columns, name)[row] = getattr(params, name)
        columns.seed[row] = seed_words(request.seed)
        columns.bias_count[row] = len(params.logit_bias)
        columns.prompt_len[row] = request.prompt_len
        self._plain[row] = params.is_plain and request.constraint is None
        self._constraints[row] = request.constraint
        self._held_back_stops[row] = len(request.held_back_stops)
        self._stops_from[row] = request.prompt_len + params.min_tokens

    def inputs(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], samples: NDArray[np.bool_], padded_rows: int
    ) -> StepSampling:
        """Inputs for `rows` [n], padded to `padded_rows`: the fewest that give the rows that sample what they ask for.

        Rows that do not sample, and padding, ask for nothing and record nothing. Constraints are asked now.
        """
        if not self._plain[rows[samples]].all():
            full = self._full_inputs(rows, positions, samples, padded_rows)
            return (
                ConstrainedInputs(full, self._mask(rows, samples, padded_rows))
                if self.constrains(rows[samples])
                else full
            )
        asking = np.flatnonzero(samples)
        position, history_row = np.zeros(padded_rows, np.int32), np.full(padded_rows, self._max_requests, np.int32)
        position[asking], history_row[asking] = positions[asking], rows[asking]
        return GreedyInputs(position, history_row)

    def are_plain(self, rows: NDArray[np.int64]) -> bool:
        """Whether all requests of `rows` [n] ask for nothing but the most likely token."""
        return bool(self._plain[rows].all())

    def constrains(self, rows: NDArray[np.int64]) -> bool:
        """Whether any request of `rows` [n] is held to certain tokens."""
        return any(self._constraints[row] is not None for row in rows[~self._plain[rows]].tolist())

    def padding(self, padded_rows: int, kind: type[StepSampling]) -> StepSampling:
        """Inputs for a step of padding alone, of a kind."""
        none = np.zeros(0, np.int64)
        if kind is GreedyInputs:
            return self.inputs(none, none, none.astype(np.bool_), padded_rows)
        full = self._full_inputs(none, none, none.astype(np.bool_), padded_rows)
        return full if kind is SamplingInputs else ConstrainedInputs(full, self._mask(none, none, padded_rows))

    def _mask(
        self, rows: NDArray[np.int64], samples: NDArray[np.bool_] | NDArray[np.int64], padded_rows: int
    ) -> NDArray[np.uint32]:
        mask = np.full((padded_rows, self._mask_words), EVERY_TOKEN, np.uint32)
        for index in np.flatnonzero(samples).tolist():
            constraint = self._constraints[rows[index]]
            if constraint is not None:
                mask[index] = constraint.allowed()
        return mask

    def _full_inputs(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], samples: NDArray[np.bool_], padded_rows: int
    ) -> SamplingInputs:
        asking = np.flatnonzero(samples)
        gathered = []
        for name, column in zip(SamplingInputs._fields, self._columns, strict=True):
            padded = np.zeros((padded_rows, *column.shape[1:]), column.dtype)
            if name == "history_row":
                padded[:] = self._max_requests
            elif name in ("top_p", "repetition_penalty"):
                padded[:] = 1
            padded[asking] = positions[asking] if name == "position" else column[rows[asking]]
            if name == "bias_count":
                early = positions[asking] < self._stops_from[rows[asking]]
                padded[asking] += np.where(early, self._held_back_stops[rows[asking]], 0)
            gathered.append(padded)
        return SamplingInputs(*gathered)
