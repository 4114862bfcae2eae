"""What a benchmark asks of the engine: requests and when each arrives, drawn by seed or read from a file.

A workload is complete before anything runs, so that every arm and every pass meets the same one. Random token ids share
no prefix but by chance, which `shared_prefix` rules out where it matters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kv_common.errors import JaxkvError


class WorkloadError(JaxkvError):
    """A workload that cannot be made or read."""


class TraceRequest(NamedTuple):
    """`prompt` token ids that arrive `arrival_s` seconds after the start and ask for exactly `max_tokens` tokens."""

    arrival_s: float
    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def context_tokens(self) -> int:
        """Prompt and answer together."""
        return len(self.prompt) + self.max_tokens


class Workload(NamedTuple):
    """`requests` in order of arrival; `primer` are run to their end before the clock starts."""

    requests: tuple[TraceRequest, ...]
    primer: tuple[TraceRequest, ...] = ()

    @property
    def longest_context(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max(request.context_tokens for request in (*self.requests, *self.primer))


class Lengths(NamedTuple):
    """Prompt and output tokens of synthetic requests, each drawn uniformly from (1 - vary) times to 1 times these."""

    prompt_tokens: int
    output_tokens: int
    vary: float = 0.0


def closed_batch(requests: int, lengths: Lengths, *, vocab_size: int, seed: int) -> Workload:
    """`requests` that are all there at the start. Raises WorkloadError."""
    return _synthetic(np.zeros(_positive("requests", requests)), lengths, vocab_size, seed)


def poisson_arrivals(requests: int, rate: float, lengths: Lengths, *, vocab_size: int, seed: int) -> Workload:
    """The requests of `closed_batch`, arriving at random, `rate` a second on average. Raises WorkloadError."""
    if not rate > 0:
        raise WorkloadError(f"a rate of {rate:g} requests per second: give more than 0")
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, _positive("requests", requests))
    return _synthetic(np.cumsum(gaps), lengths, vocab_size, seed)


def shared_prefix(requests: int, shared: int, own: int, output_tokens: int, *, vocab_size: int, seed: int) -> Workload:
    """`requests` that begin with the same `shared` tokens and differ from the next on, all there at the start.

    Any two share exactly `shared` tokens. Raises WorkloadError, also for more requests than the vocabulary has tokens.
    """
    for name, value in (("requests", requests), ("shared", shared), ("own", own), ("output_tokens", output_tokens)):
        _positive(name, value)
    if requests > vocab_size:
        raise WorkloadError(
            f"{requests} requests cannot all differ in one of {vocab_size} tokens: give at most {vocab_size} requests"
        )
    rng = np.random.default_rng([seed, 0])
    common = rng.integers(0, vocab_size, shared)
    firsts = rng.permutation(vocab_size)[:requests]
    prompts = (np.concatenate([common, [first], rng.integers(0, vocab_size, own - 1)]) for first in firsts)
    return Workload(tuple(TraceRequest(0.0, tuple(prompt.tolist()), output_tokens) for prompt in prompts))


def read_workload(path: Path, first: int | None = None) -> Workload:
    """A JSON list of `{"prompt": [ids], "max_tokens": n, "arrival_s": seconds}`, the last of which may be left out.

    Or an object with such lists under `requests` and `primer`. `first` keeps that many requests. Raises WorkloadError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"trace file {path} cannot be read ({error.strerror}): give a JSON file") from None
    except ValueError as error:
        raise WorkloadError(f"trace file {path} is not JSON ({error}): give a list of requests") from None
    lists = content if isinstance(content, dict) else {"requests": content}
    requests, primer = (
        tuple(_read_request(path, f"{key}[{index}]", item) for index, item in enumerate(_list(path, lists, key)))
        for key in ("requests", "primer")
    )
    if not requests:
        raise WorkloadError(f"trace file {path} has no requests: give a list of at least one")
    if first is not None:
        requests = requests[: _positive("requests", first)]
    return Workload(tuple(sorted(requests, key=lambda request: request.arrival_s)), primer)


def shareable_tokens(workload: Workload) -> int:
    """Prompt tokens that somebody asked for before: each prompt's longest common beginning with any earlier one.

    A request computes at least its last token. Requests are in the order of arrival, after the primer.
    """
    total = 0
    earlier = [np.asarray(request.prompt) for request in workload.primer]
    for request in workload.requests:
        prompt = np.asarray(request.prompt)
        total += min(len(prompt) - 1, max((_common(prompt, other) for other in earlier), default=0))
        earlier.append(prompt)
    return total


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(np.argmax(differ)) if differ.any() else length


def _synthetic(arrivals: np.ndarray, lengths: Lengths, vocab_size: int, seed: int) -> Workload:
    if not 0 <= lengths.vary < 1:
        raise WorkloadError(f"lengths vary by {lengths.vary:g} of themselves: give 0 up to, but not, 1")
    rng = np.random.default_rng([seed, 0])
    sizes = []
    for name, longest in (("prompt_tokens", lengths.prompt_tokens), ("output_tokens", lengths.output_tokens)):
        shortest = max(1, round(_positive(name, longest) * (1 - lengths.vary)))
        sizes.append(rng.integers(shortest, longest, arrivals.size, endpoint=True))
    return Workload(
        tuple(
            TraceRequest(float(at), tuple(rng.integers(0, vocab_size, prompt).tolist()), int(output))
            for at, prompt, output in zip(arrivals, *sizes, strict=True)
        )
    )


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise WorkloadError(f"{name} is {value}: give at least 1")
    return value


def _list(path: Path, lists: dict[str, Any], key: str) -> Sequence[Any]:
    found = lists.get(key, [])
    if not isinstance(found, list):
        raise WorkloadError(f"trace file {path}: {key} is not a list: give a list of requests")
    return found


def _read_request(path: Path, where: str, item: Any) -> TraceRequest:
    wrong = None
    if not isinstance(item, dict) or not {"prompt", "max_tokens"} <= item.keys():
        wrong = 'give {"prompt": [token ids], "max_tokens": n}'
    elif not isinstance(item["prompt"], list) or not item["prompt"] or not all(map(_is_count, item["prompt"])):
        wrong = "prompt must be a list of at least one token id"
    elif not _is_count(item["max_tokens"]) or item["max_tokens"] < 1:
        wrong = f"max_tokens is {item['max_tokens']!r}: give at least 1"
    elif not _is_seconds(item.get("arrival_s", 0.0)):
        wrong = f"arrival_s is {item['arrival_s']!r}: give seconds from the start, 0 or more"
    if wrong:
        raise WorkloadError(f"trace file {path}, {where}: {wrong}")
    return TraceRequest(float(item.get("arrival_s", 0.0)), tuple(item["prompt"]), item["max_tokens"])


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")
