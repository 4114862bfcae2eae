"""Log-probabilities and vectors of prompts, one group after another, a step at a time between the steps of the rest.

Contract: a prompt that finds no row or no pages waits for as long as something else runs. The programs that it needs
are compiled on a thread beside, so that what else runs goes on. Only what is asked for is kept of a step: a row of the
vocabulary for each token would fill the memory.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_serving.server.request_group import Event, PoolingGroup, PromptScores, PromptVectors, RequestGroup, ScoredToken

if TYPE_CHECKING:
    from kv_execution import PagedEngine
    from kv_execution.prompt_programs import CompileBeside


COMPILER_POLL_S = 0.01
"""How often requests are looked for while there is nothing to do but to wait for the compiler."""


class PromptScorer:
    """The prompts that wait for their scores or vectors; the first of them may be on its way."""

    def __init__(self) -> None:
        self._waiting: deque[RequestGroup] = deque()
        self._steps: Generator[Event | None] | None = None
        self._compiler = ThreadPoolExecutor(1, "compiler")
        self._compiling: Future[Any] | None = None

    @property
    def waiting(self) -> int:
        """Groups that have neither yet."""
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

    def step(self, engine: "PagedEngine", *, may_wait: bool) -> Event | None:
        """One step of the first prompt; what it comes to, where that was the last. `may_wait`: something else is to be
        done meanwhile.

        Raises what `score_steps` and `embed_steps` raise, but where it `may_wait` not for a lack of rows or pages.
        """
        from kv_control.page_allocator import OutOfPagesError
        from kv_control.request_map import NoFreeRowError

        group = self.current
        if self._compiling is not None and not may_wait:
            wait([self._compiling], COMPILER_POLL_S)
        if self._steps is None:
            steps = _pooled if isinstance(group, PoolingGroup) else _scored
            self._steps = steps(engine, group, self._compile)
        try:
            event = next(self._steps)
        except (NoFreeRowError, OutOfPagesError):
            self.restart()
            if may_wait:
                return None
            raise
        if event is not None:
            self.remove(group)
        return event

    def restart(self) -> None:
        """Begin the first prompt again, or not at all."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    def _compile(self, function: Callable[[], object]) -> "Future[Any]":
        self._compiling = self._compiler.submit(function)
        return self._compiling


def _scored(engine: "PagedEngine", group: RequestGroup, beside: "CompileBeside") -> Generator[Event | None]:
    """None after each step but the last, and then the scores of the group's prompt."""
    tokens = [ScoredToken(int(group.token_ids[0]), None, ())] if len(group.token_ids) else []
    with contextlib.closing(
        engine.score_steps(  # type: ignore[type-var]
            group.token_ids, cache_salt=group.cache_salt, adapter=group.adapter, beside=beside
        )
    ) as parts:
        for part in parts:
            follow = np.asarray(group.token_ids[len(tokens) : len(tokens) + len(part)], np.int64)
            tokens += scored_tokens(part[: len(follow)], follow, group.prompt_logprobs or 0)
            yield None if len(tokens) < len(group.token_ids) else PromptScores(tuple(group.choices), tokens)


def _pooled(engine: "PagedEngine", group: RequestGroup, beside: "CompileBeside") -> Generator[Event | None]:
    """None after each step but the last, and then the vectors of the group's prompts."""
    assert isinstance(group, PoolingGroup)
    rest = group.prompts[len(group.vectors) :]
    with contextlib.closing(
        engine.embed_steps(  # type: ignore[type-var]
            rest, pooling=group.pooling, cache_salt=group.cache_salt, adapter=group.adapter, beside=beside
        )
    ) as parts:
        for part in parts:
            group.vectors.extend(part)
            yield None if len(group.vectors) < len(group.prompts) else PromptVectors(np.stack(group.vectors))


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
