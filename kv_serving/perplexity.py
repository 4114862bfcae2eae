"""Perplexity of a model over a text: of the tokens of fixed windows, each seen from the start of its own window."""

import gc
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from rich.console import Console

from kv_common.errors import JaxkvError
from kv_common.layout import KvStorageLayoutV1
from kv_serving.memory import release_unused_memory
from kv_serving.session import open_model, tokenizer_of

WINDOW_TOKENS = 256
_PAGE_TOKENS = 16


class TextError(JaxkvError):
    """A text that cannot be scored."""


class Perplexity(NamedTuple):
    """exp of the mean negative log-probability of `tokens` tokens, all but the first of every window."""

    value: float
    tokens: int
    window: int


def perplexity_of(source: str, text: str, dtype: str, progress: Callable[[int, int], None]) -> Perplexity:
    """Load the model, score `text` in windows of at most WINDOW_TOKENS, and let the model go; `progress` is told how
    many windows of how many are done.

    Raises TextError for a text of less than two tokens, and what `open_model` and `PagedEngine` raise.
    """
    from kv_execution import EngineConfig, PagedEngine

    model = open_model(source, dtype, Console(quiet=True))
    token_ids = tokenizer_of(model).encode(text)
    window = min(WINDOW_TOKENS, model.spec.max_context)
    windows = [token_ids[first : first + window] for first in range(0, len(token_ids), window)]
    windows = [each for each in windows if len(each) > 1]
    if not windows:
        raise TextError(f"the text has {len(token_ids)} tokens, scoring takes two at least: give a longer one")
    spec = model.spec
    pages = -(-window // _PAGE_TOKENS) + 2  # one of padding, one to copy to
    layout = KvStorageLayoutV1(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_pages=pages,
        tokens_per_page=_PAGE_TOKENS,
        dtype=spec.dtype,
    )
    config = EngineConfig(
        kv_pool_bytes=layout.pool_bytes_per_shard,
        tokens_per_page=_PAGE_TOKENS,
        max_requests=1,
        max_step_tokens=window,
        max_context=window,
        prefix_cache=False,
    )
    engine = PagedEngine(model, config)
    engine.init_paged_runtime()
    total, tokens = 0.0, 0
    for number, ids in enumerate(windows):
        logprobs = engine.score(ids)
        total += float(np.sum(logprobs[np.arange(len(ids) - 1), ids[1:]], dtype=np.float64))
        tokens += len(ids) - 1
        progress(number + 1, len(windows))
    del engine, model
    gc.collect()
    release_unused_memory()
    return Perplexity(math.exp(-total / tokens), tokens, window)
