"""The engines that can be compared, and the process that runs one of them.

That process imports nothing but what its engine needs: how long it takes to start is measured.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_cpp_peer import LlamaCpp
from peer_process import serve
from peers import Jaxkv, OpenVino, Peer
from workloads import Workload

if TYPE_CHECKING:
    from gguf_forms import Form

THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Engine:
    """How an engine is made, on which form of the model's file, and which workloads it runs by default."""

    make: Callable[..., Peer]
    form: Form | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    traces: bool = True
    by_default: bool = True


THREADED = {"threads": THREADS}
# The fastest of each peer's settings on the machines tried, for one workload or another; the rest on request.
ENGINES = {
    # Sixteen bits of K/V beside quantized weights, as the peers have it by default.
    "jaxkv.stored": Engine(Jaxkv, None, {"kv": "float16"}),
    "jaxkv.stored_bf16": Engine(Jaxkv, None, {"kv": "bfloat16", "dtype": "bfloat16"}),
    # What llama.cpp and openvino-genai do with activations by default.
    "jaxkv.stored_int8": Engine(Jaxkv, None, {"kv": "bfloat16", "dtype": "bfloat16", "int8": True}),
    "jaxkv.float32": Engine(Jaxkv, "float32", {"kv": "float32"}, traces=False),
    "llama_cpp.stored": Engine(LlamaCpp, None, THREADED),
    "llama_cpp.float32": Engine(LlamaCpp, "float32", THREADED, traces=False),
    "openvino.stored": Engine(OpenVino, None, THREADED),
    "openvino.stored_f32": Engine(OpenVino, None, {**THREADED, "precision": "f32"}),
    "openvino.float16": Engine(OpenVino, "float16", THREADED),
    "openvino.float32": Engine(OpenVino, "float16", {**THREADED, "precision": "f32", "kv": "f32"}, by_default=False),
}


def make_peer(name: str, path: Path, only: Workload | None) -> Peer:
    """The engine called `name`; jaxkv is made no larger than `only` needs, where that is all it will run."""
    engine = ENGINES[name]
    options = dict(engine.options)
    if engine.make is Jaxkv and only is not None:
        options["only"] = only
    peer = engine.make(path, **options)
    gc.freeze()
    gc.enable()
    return peer


def main(arguments: Sequence[str]) -> None:
    """Serve the engine of this name and model; with `--once`, one workload that is known before it starts."""
    gc.disable()  # until it has started, as the `jaxkv` commands do
    name, model, *once = arguments
    serve(partial(make_peer, name, Path(model)), once=once == ["--once"])


if __name__ == "__main__":
    main(sys.argv[1:])
