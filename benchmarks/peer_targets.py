"""What a timeline of tokens amounts to, and which targets that meets.

Decode is the rate between the moment when the last request has its first token and the moment when the first request
ends, so that every step in it is a step of the whole batch; prefill is the prompt over the time to its first token; a
trace is measured from when all its requests were submitted. A target is met by its ratio to the best of its peers, or
by 80% of what the machine itself could do: no engine that reads those bytes and does those multiply-adds can be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gguf_forms import ModelCosts
from latency import percentile
from peers import shared_tokens
from workloads import TraceRequest, Workload

ENOUGH_OF_LIMIT = 0.8


class Measure(NamedTuple):
    """One number of one pass."""

    value: float
    unit: str


class Target(NamedTuple):
    """`ours` against the best of the engines whose names begin with `peers`: a ratio of at least, or at most, `needed`.

    With no `peers` the value itself is what must be at most `needed`.
    """

    name: str
    workload: str
    measure: str
    ours: str
    peers: str | None
    needed: float
    at_most: bool = False


FLOAT32 = "jaxkv.float32"
STORED = ("jaxkv.stored", "jaxkv.stored_bf16", "jaxkv.stored_int8")
"""On the file as it is, activations in float32, in bfloat16, and rounded to 8 bits where quantized weights meet them;
each is held to the same targets.
"""

LLAMA, ANY = "llama_cpp.stored", ""


def _stored_targets(ours: str) -> list[Target]:
    arm = ours.removeprefix("jaxkv.")
    found = [Target(f"decode_b1.{arm}.over_llama_cpp", "decode_b1", "rate", ours, LLAMA, 1.3)]
    for name in ("decode_b16", "decode_b32"):
        found += [
            Target(f"{name}.{arm}.over_llama_cpp", name, "rate", ours, LLAMA, 3.0),
            Target(f"{name}.{arm}.over_best", name, "rate", ours, ANY, 1.3),
        ]
    for name in ("prefill_512", "prefill_2048"):
        found += [
            Target(f"{name}.{arm}.over_llama_cpp", name, "rate", ours, LLAMA, 2.0),
            Target(f"{name}.{arm}.over_best", name, "rate", ours, ANY, 1.0),
        ]
    return [
        *found,
        Target(f"trace.output_rate.{arm}.over_best", "trace", "output_rate", ours, ANY, 1.5),
        Target(f"trace.ttft_p50.{arm}.over_best", "trace", "ttft_p50", ours, ANY, 0.7, at_most=True),
        Target(f"prefix.total.{arm}.over_best", "prefix", "total", ours, ANY, 0.5, at_most=True),
    ]


def _float32_targets() -> list[Target]:
    needed = {"decode_b1": 1.2, "decode_b16": 1.5, "decode_b32": 1.5, "prefill_512": 1.2, "prefill_2048": 1.2}
    return [
        Target(f"{name}.float32.over_llama_cpp", name, "rate", FLOAT32, "llama_cpp.float32", ratio)
        for name, ratio in needed.items()
    ]


TARGETS = (
    *(target for arm in STORED for target in _stored_targets(arm)),
    *_float32_targets(),
    Target("startup.warm", "startup", "warm", STORED[0], None, 2.0, at_most=True),
    Target("startup.cold", "startup", "cold", STORED[0], None, 8.0, at_most=True),
    Target("startup.memory_overhead", "startup", "memory_overhead", STORED[0], None, 300.0, at_most=True),
)


def measures_of(
    workload: str, requests: Sequence[TraceRequest], token_s: Sequence[Sequence[float]]
) -> dict[str, Measure]:
    """The numbers of one pass of `workload`; `token_s` are each request's token times, seconds from submission."""
    first = [times[0] for times in token_s]
    end = max(times[-1] for times in token_s)
    if workload.startswith("decode"):
        return {"rate": Measure(_decode_rate(token_s), "tokens/s")}
    if workload.startswith("prefill"):
        prompts = sum(len(request.prompt) for request in requests)
        return {"rate": Measure(prompts / max(first), "tokens/s"), "ttft": Measure(max(first), "s")}
    return {
        "output_rate": Measure(sum(map(len, token_s)) / end, "tokens/s"),
        "total": Measure(end, "s"),
        "ttft_p50": Measure(percentile(first, 50), "s"),
        "ttft_p90": Measure(percentile(first, 90), "s"),
    }


def _decode_rate(token_s: Sequence[Sequence[float]]) -> float:
    begin = max(times[0] for times in token_s)
    end = min(times[-1] for times in token_s)
    if end <= begin:  # too few tokens for a window in which all are at it
        end = max(times[-1] for times in token_s)
    return sum(begin < at <= end for times in token_s for at in times) / (end - begin)


def limit_seconds(
    requests: Sequence[TraceRequest], begins: Sequence[int], costs: ModelCosts, bandwidth: float, flops: float
) -> float:
    """The least time in which the machine can compute `requests` from their tokens at `begins` to their ends.

    The last token of an answer is never computed. Whatever an engine does, a request takes a step for each token of
    its answer, each step reads the weights, and the steps of different requests may be the same ones.
    """
    operations = read = 0.0
    steps = 0
    for request, begin in zip(requests, begins, strict=True):
        prompt, end = len(request.prompt), request.context_tokens - 1
        outputs = end - max(begin, prompt - 1)
        operations += 2 * costs.body_parameters * (end - begin) + 2 * costs.output_parameters * outputs
        operations += costs.attention_flops * (end * (end + 1) - begin * (begin + 1)) / 2
        generated = max(begin, prompt)
        read += costs.kv_bytes * (end * (end + 1) - generated * (generated + 1)) / 2
        steps = max(steps, outputs)
    return max(operations / flops, (steps * costs.weight_bytes + read) / bandwidth)


def limits_of(name: str, workload: Workload, costs: ModelCosts, bandwidth: float, flops: float) -> dict[str, float]:
    """The machine's limit for each measure of the workload called `name` that has one.

    What all requests begin with is computed for the first of them alone, or for none after a primer.
    """
    requests = workload.requests
    if name.startswith("decode"):
        seconds = limit_seconds(requests, [len(request.prompt) for request in requests], costs, bandwidth, flops)
        return {"rate": sum(request.max_tokens - 1 for request in requests) / seconds}
    shared = shared_tokens(workload)
    begins = [shared if index or workload.primer else 0 for index in range(len(requests))]
    seconds = limit_seconds(requests, begins, costs, bandwidth, flops)
    if name.startswith("prefill"):
        return {"rate": sum(len(request.prompt) for request in requests) / seconds}
    return {"output_rate": sum(request.max_tokens for request in requests) / seconds, "total": seconds}


def judge(
    target: Target, values: Mapping[str, Mapping[str, float]], limits: Mapping[str, float]
) -> dict[str, object] | None:
    """One line about `target`, or None where our own value is missing.

    `values` are medians by engine, then by "workload.measure"; `limits` are the machine's for our own engine, likewise.
    `met` is None where there is neither a peer nor a limit to compare with.
    """
    key = f"{target.workload}.{target.measure}"
    if key not in values.get(target.ours, {}):
        return None
    ours = values[target.ours][key]
    best: Callable = min if target.at_most else max
    rivals = {
        engine: found[key]
        for engine, found in values.items()
        if target.peers is not None
        and not engine.startswith("jaxkv")
        and engine.startswith(target.peers)
        and key in found
    }
    peer = best(rivals, key=rivals.__getitem__) if rivals else None
    ratio = ours / rivals[peer] if peer is not None else None
    compared = ours if target.peers is None else ratio
    fraction = None
    if key in limits:
        fraction = limits[key] / ours if target.at_most else ours / limits[key]
    by_ratio = None if compared is None else compared <= target.needed if target.at_most else compared >= target.needed
    by_limit = fraction is not None and fraction >= ENOUGH_OF_LIMIT
    return {
        "target": target.name,
        "met": True if by_limit else by_ratio,
        "ratio": ratio,
        "needed": target.needed,
        "needed_is": "at most" if target.at_most else "at least",
        "value": ours,
        "peer": peer,
        "peer_value": None if peer is None else rivals[peer],
        "fraction_of_limit": fraction,
    }
