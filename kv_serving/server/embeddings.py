"""Vectors and labels of texts, which the engine computes a step at a time between the steps of the rest.

Contract: a request counts as one that is being answered until it has its vectors; when its client goes away what runs
for it is aborted.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_serving.server.classification import ClassifyRequest
from kv_serving.server.context import salt_of
from kv_serving.server.embedding_protocol import EmbeddingRequest, InputFields
from kv_serving.server.engine_loop import EngineLoop
from kv_serving.server.errors import ApiError, api_error_of
from kv_serving.server.request_group import EventChannel, Failure, PoolingGroup, PromptVectors

if TYPE_CHECKING:
    from kv_serving.server.server_metrics import ServerMetrics
    from kv_serving.server.service import Service


class Pooled(NamedTuple):
    """Vectors [inputs, hidden] of length 1 or scores [inputs, labels], the tokens of all inputs, and what the request
    calls the model.
    """

    vectors: NDArray[np.float32]
    prompt_tokens: int
    model: str

    def facts(self) -> dict[str, object]:
        """What the log and the traces tell of it."""
        return {"model": self.model, "prompt_tokens": self.prompt_tokens}


class Embeddings:
    """What /v1/embeddings and /classify do."""

    def __init__(self, service: "Service", engine: EngineLoop, metrics: "ServerMetrics", pooling: str) -> None:
        """`pooling` as `PagedEngine.embed` has it."""
        self._service = service
        self._engine = engine
        self._metrics = metrics
        self._pooling = pooling

    async def embed(self, request: EmbeddingRequest, tenant: str) -> Pooled:
        """A vector for each input. Raises ApiError."""
        request.check_dimensions(self._service.model.spec.hidden_size)
        return await self._pool(request, self._pooling, tenant)

    async def classify(self, request: ClassifyRequest, tenant: str) -> Pooled:
        """The scores of each input. Raises ApiError."""
        from kv_execution.embedding import SCORES

        if not self._service.model.labels:
            raise ApiError(400, f"{self._service.name} is no classifier: ask it for completions or embeddings")
        return await self._pool(request, SCORES, tenant)

    async def _pool(self, request: InputFields, pooling: str, tenant: str) -> Pooled:
        service = self._service
        service.check_model(request.model)
        request.check()
        prompts = [await service.encode(each) if isinstance(each, str) else each for each in request.inputs]
        for prompt in prompts:
            service.limits.check_prompt(len(prompt))
        group = PoolingGroup(
            prompts,
            pooling,
            EventChannel(),
            adapter=service.adapter_of(request.model),
            cache_salt=salt_of(tenant, request.cache_salt),
            deadline_s=service.limits.deadline_of(request.deadline_s),
        )
        with service.concurrency.hold(group.channel):
            for prompt in prompts:
                self._metrics.prompt(len(prompt))
            vectors = await self._run(group)
        return Pooled(vectors, sum(map(len, prompts)), request.model or service.name)

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
