"""Log-probabilities of prompts, one after another, a step at a time between the steps of the rest.

Contract: a prompt that finds no row or no pages waits for as long as something else runs. Only what is asked for is
kept of a step: a row of the vocabulary for each token would fill the memory.
"""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_serving.server.request_group import RequestGroup, ScoredToken

if TYPE_CHECKING:
    from kv_execution import PagedEngine


class ScoredPrompt(NamedTuple):
    """A group, and its prompt's tokens with their scores."""

    group: RequestGroup
    tokens: list[ScoredToken]


class PromptScorer:
    """The prompts that wait for their scores; the first of them may be on its way."""

    def __init__(self) -> None:
        self._waiting: deque[RequestGroup] = deque()
        self._steps: Iterator[NDArray[np.float32]] | None = None
        self._tokens: list[ScoredToken] = []

    @property
    def waiting(self) -> int:
        """Prompts that have no scores yet."""
        return len(self._waiting)

    @property
    def current(self) -> RequestGroup:
        """The group whose prompt is next."""
        return self._waiting[0]

    def add(self, group: RequestGroup) -> None:
        """Queue a group's prompt."""
        self._waiting.append(group)

    def pop(self) -> RequestGroup:
        """Forget the first group."""
        group = self.current
        self.remove(group)
        return group

    def remove(self, group: RequestGroup) -> None:
        """Forget a group, wherever it is."""
        if group in self._waiting:
            if group is self._waiting[0]:
                self.restart()
            self._waiting.remove(group)

    def step(self, engine: "PagedEngine", *, may_wait: bool) -> ScoredPrompt | None:
        """One step of the first prompt; what it comes to, where that was the last.

        Raises what `score_steps` raises, but where it `may_wait` not for a lack of rows or pages.
        """
        from kv_control.page_allocator import OutOfPagesError
        from kv_control.request_map import NoFreeRowError

        group = self.current
        if self._steps is None:
            self._tokens = [ScoredToken(int(group.token_ids[0]), None, ())] if len(group.token_ids) else []
            self._steps = engine.score_steps(group.token_ids, cache_salt=group.cache_salt, adapter=group.adapter)
        try:
            part = next(self._steps)
        except (NoFreeRowError, OutOfPagesError):
            self.restart()
            if may_wait:
                return None
            raise
        follow = np.asarray(group.token_ids[len(self._tokens) : len(self._tokens) + len(part)], np.int64)
        self._tokens += scored_tokens(part[: len(follow)], follow, group.prompt_logprobs or 0)
        if len(self._tokens) < len(group.token_ids):
            return None
        tokens = self._tokens
        self.remove(group)
        return ScoredPrompt(group, tokens)

    def restart(self) -> None:
        """Begin the first prompt again, or not at all."""
        steps, self._steps, self._tokens = self._steps, None, []
        if steps is not None:
            steps.close()  # type: ignore[attr-defined]


def scored_tokens(logprobs: NDArray[np.float32], follow: NDArray[np.integer], top: int) -> list[ScoredToken]:
    """The tokens `follow` [n] that came after those whose `logprobs` [n, vocab] are given, with the `top` likeliest."""
    own = np.take_along_axis(logprobs, follow[:, None], axis=1)[:, 0].tolist()
    if not top:
        return [ScoredToken(token, logprob, ()) for token, logprob in zip(follow.tolist(), own, strict=True)]
    some = np.argpartition(-logprobs, min(top, logprobs.shape[1]) - 1, axis=1)[:, :top]
    values = np.take_along_axis(logprobs, some, axis=1)
    order = np.lexsort((some, -values), axis=1)
    ids, values = np.take_along_axis(some, order, axis=1), np.take_along_axis(values, order, axis=1)
    return [
        ScoredToken(token, logprob, tuple(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(follow.tolist(), own, ids.tolist(), values.tolist(), strict=True)
    ]
