"""Engines over the golden checkpoints, with small shapes."""

import functools
from pathlib import Path

import numpy as np
from default_provider import PROVIDER

from kv_execution import EngineConfig, PagedEngine
from models import LoadedModel, load_model

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"


@functools.cache
def golden_model(case: str, dtype: str = "float32") -> LoadedModel:
    """A golden checkpoint; loaded once for all tests."""
    return load_model(GOLDEN / case, dtype=dtype)


def make_engine(model: LoadedModel, *, pages: int | None = None, **settings) -> PagedEngine:
    """An engine with small shapes and a fresh runtime; `pages` usable pages where given.

    The same settings give the same engine, so that what it compiled serves the next test.
    """
    settings = {
        "max_requests": 4,
        "max_step_tokens": 64,
        "max_context": 128,
        "kv_pool_bytes": 1 << 20,
        "provider": PROVIDER,
        "burst_s": 0.0,  # so that a step is one step, whatever the clock says
        **settings,
    }
    if pages is not None:
        spec, tokens_per_page = model.spec, settings.get("tokens_per_page", 16)
        itemsize = 4 if spec.dtype == "float32" else 2
        heads = spec.num_kv_heads if model.tensor_mesh is None else spec.num_kv_heads // model.tensor_mesh.axes.shards
        page_bytes = 2 * spec.num_layers * tokens_per_page * heads * spec.head_dim * itemsize
        settings["kv_pool_bytes"] = (pages + 1) * page_bytes
    engine = _engine(model, EngineConfig(**settings))
    engine.init_paged_runtime()
    return engine


@functools.cache
def _engine(model: LoadedModel, config: EngineConfig) -> PagedEngine:
    return PagedEngine(model, config)


def golden_prompts(case: str) -> list[np.ndarray]:
    expected = np.load(GOLDEN / case / "expected.npz")
    return [expected[f"prompt_{index}"] for index in range(4)]
