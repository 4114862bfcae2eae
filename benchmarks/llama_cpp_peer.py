"""llama.cpp as a peer: its C interface, because the Python class over it runs one sequence at a time.

A batch holds the next tokens of all requests that are being answered, and chunks of prompts after them until it is
full. Each request is a sequence with a K/V cache of its own, which measured faster than one cache for all; what all
requests begin with is computed once, in one more sequence, and copied into theirs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peers import BATCH_TOKENS, Clock, PeerError, Timeline, shared_tokens
from workloads import TraceRequest, Workload


class Part(NamedTuple):
    """Tokens of one sequence in a batch, from position `start`; `output` for a next token after the last."""

    sequence: int
    start: int
    tokens: Sequence[int]
    output: bool


class LlamaCpp:
    """A model in llama.cpp, with a context as large as the last run needed, made before its clock started."""

    def __init__(self, path: Path, *, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise PeerError(f"llama.cpp cannot load {path}: give a GGUF file that it supports")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads
        self._held: tuple[tuple[int, int], Any] | None = None
        system = llama_cpp.llama_print_system_info().decode()
        self.about = {"version": llama_cpp.__version__, "system": system, "kv": "float16"}

    def run(self, workload: Workload) -> Timeline:
        lib, requests = self._lib, workload.requests
        shared = shared_tokens(workload)
        holder = len(requests)  # one more sequence holds what all begin with
        context = self._context(workload, sequences=holder + (shared > 0))
        memory = lib.llama_get_memory(context)
        lib.llama_memory_clear(memory, False)
        prefix = list(requests[0].prompt[:shared])
        if workload.primer:
            self._prefill(context, holder, prefix)
        clock = Clock(len(requests))
        if shared and not workload.primer:
            self._prefill(context, holder, prefix)
        done = [shared] * len(requests)
        if shared:
            for index in range(len(requests)):
                lib.llama_memory_seq_cp(memory, holder, index, -1, -1)
        answers: list[list[int]] = [[] for _ in requests]
        while any(len(answer) < request.max_tokens for answer, request in zip(answers, requests, strict=True)):
            parts, rows = self._plan(requests, done, answers)
            tokens = self._decode(context, parts)
            for index, token in zip(rows, tokens, strict=True):
                answers[index].append(int(token))
                clock.note(index, int(token))
        return clock.timeline()

    def _plan(
        self, requests: Sequence[TraceRequest], done: list[int], answers: Sequence[Sequence[int]]
    ) -> tuple[list[Part], list[int]]:
        """The next batch, and the request of each of its outputs; `done` moves on."""
        parts: list[Part] = []
        rows: list[int] = []
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            if answer and len(answer) < request.max_tokens:
                parts.append(Part(index, done[index], answer[-1:], True))
                rows.append(index)
                done[index] += 1
        room = BATCH_TOKENS - len(parts)
        for index, request in enumerate(requests):
            left = len(request.prompt) - done[index]
            if left > 0 and room:
                chunk = request.prompt[done[index] : done[index] + room]
                parts.append(Part(index, done[index], chunk, len(chunk) == left))
                done[index] += len(chunk)
                room -= len(chunk)
                if len(chunk) == left:
                    rows.append(index)
        return parts, rows

    def _context(self, workload: Workload, sequences: int) -> Any:
        lib = self._lib
        longest = -(-(workload.longest_context + 1) // 256) * 256
        if self._held is not None:
            size, context = self._held
            if size == (sequences, longest):
                return context
            lib.llama_free(context)
        params = lib.llama_context_default_params()
        params.n_ctx = longest * sequences
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        params.no_perf = True
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise PeerError(f"llama.cpp has no context of {sequences} sequences of {longest} tokens: use fewer")
        self._held = (sequences, longest), context
        return context

    def _prefill(self, context: Any, sequence: int, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), BATCH_TOKENS):
            self._decode(context, [Part(sequence, start, tokens[start : start + BATCH_TOKENS], False)])

    def _decode(self, context: Any, parts: Sequence[Part]) -> np.ndarray:
        """Run one batch; the most likely token of each part that has an output."""
        lib = self._lib
        token = np.concatenate([np.asarray(part.tokens, np.int32) for part in parts])
        count = len(token)
        position = np.concatenate([np.arange(len(part.tokens), dtype=np.int32) + part.start for part in parts])
        sequence = np.repeat(np.int32([part.sequence for part in parts]), [len(part.tokens) for part in parts])
        pointers = sequence.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        ones = np.ones(count, np.int32)
        wanted = np.zeros(count, np.int8)
        wanted[np.cumsum([len(part.tokens) for part in parts]) - 1] = [part.output for part in parts]
        fields = lib.llama_batch._fields_
        batch = lib.llama_batch()
        batch.n_tokens = count
        arrays = {"token": token, "pos": position, "n_seq_id": ones, "seq_id": pointers, "logits": wanted}
        for name, kind in fields:
            if name in arrays:
                setattr(batch, name, ctypes.cast(arrays[name].ctypes.data, kind))
        status = lib.llama_decode(context, batch)
        if status:
            raise PeerError(f"llama_decode of {count} tokens ended with {status}: its context may be too small")
        outputs = int(wanted.sum())
        if not outputs:
            return np.empty(0, np.int64)
        logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (outputs * self._vocab_size,))
        return logits.reshape(outputs, self._vocab_size).argmax(1)
