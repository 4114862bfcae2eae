"""Vectors of texts, which the engine computes a step at a time between the steps of the rest.

Contract: a request counts as one that is being answered until it has its vectors; when its client goes away what runs
for it is aborted.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_serving.server.context import salt_of
from kv_serving.server.embedding_protocol import EmbeddingRequest
from kv_serving.server.engine_loop import EngineLoop
from kv_serving.server.errors import api_error_of
from kv_serving.server.request_group import EventChannel, Failure, PoolingGroup, PromptVectors

if TYPE_CHECKING:
    from kv_serving.server.server_metrics import ServerMetrics
    from kv_serving.server.service import Service


class Embedded(NamedTuple):
    """Vectors [inputs, hidden] of length 1, and the tokens of all inputs."""

    vectors: NDArray[np.float32]
    prompt_tokens: int


class Embeddings:
    """What /v1/embeddings does."""

    def __init__(self, service: "Service", engine: EngineLoop, metrics: "ServerMetrics", pooling: str) -> None:
        """`pooling` as `PagedEngine.embed` has it."""
        self._service = service
        self._engine = engine
        self._metrics = metrics
        self._pooling = pooling

    async def embed(self, request: EmbeddingRequest, tenant: str) -> Embedded:
        """Raises ApiError."""
        service = self._service
        service.check_model(request.model)
        request.check(service.model.spec.hidden_size)
        prompts = [await service.encode(each) if isinstance(each, str) else each for each in request.inputs]
        for prompt in prompts:
            service.limits.check_prompt(len(prompt))
        group = PoolingGroup(
            prompts,
            self._pooling,
            EventChannel(),
            adapter=service.adapter_of(request.model),
            cache_salt=salt_of(tenant, request.cache_salt),
            deadline_s=service.limits.deadline_of(request.deadline_s),
        )
        with service.concurrency.hold(group.channel):
            for prompt in prompts:
                self._metrics.prompt(len(prompt))
            vectors = await self._run(group)
        return Embedded(vectors, sum(map(len, prompts)))

    async def _run(self, group: PoolingGroup) -> NDArray[np.float32]:
        self._engine.submit(group)
        try:
            event, *_ = await group.channel.take()
        except BaseException:  # nobody waits any more
            self._engine.abort(group)
            raise
        if isinstance(event, Failure):
            raise api_error_of(event.error) from event.error
        assert isinstance(event, PromptVectors)
        return event.vectors
