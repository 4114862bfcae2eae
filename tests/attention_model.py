"""What a paged attention kernel computes, in plain numpy over the operands it is given."""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np


def attend_row(q, k_pool, v_pool, pages, last_page_len, *, scale, window_left=-1, soft_cap=0.0) -> np.ndarray:
    """One row: q [queries, heads, head_dim] over the keys of `pages`, causal and aligned at the end -> the same shape.

    `window_left` is how many keys before its own a query sees, -1 for all.
    """
    tokens_per_page, kv_heads = k_pool.shape[1:3]
    length = (len(pages) - 1) * tokens_per_page + int(last_page_len)
    k, v = (pool[pages].reshape(-1, kv_heads, pool.shape[3])[:length].astype(np.float64) for pool in (k_pool, v_pool))
    group = q.shape[1] // kv_heads
    k, v = (np.repeat(array, group, axis=1) for array in (k, v))
    score = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * scale
    if soft_cap:
        score = soft_cap * np.tanh(score / soft_cap)
    own = length - len(q) + np.arange(len(q))[:, None]
    key = np.arange(length)
    visible = (key <= own) & ((window_left < 0) | (key >= own - window_left))
    score = np.where(visible, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)


def reporting(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as a custom call that may fail: an error that kept a view of a buffer alive would end the process."""

    @functools.wraps(function)
    def call(*operands: Any) -> None:
        try:
            function(*operands)
            return
        except Exception:
            message = traceback.format_exc()
        del operands
        raise RuntimeError(message)

    return call
