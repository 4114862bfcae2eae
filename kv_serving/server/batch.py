"""Answers the requests of a file, with the endpoints of the server and without a server.

Contract: every request gets one result, with the status that it would have had over HTTP; results come in the order in
which they are done. What is in the result file already is not asked again, so a batch that was cut off goes on.
"""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from kv_common.errors import JaxkvError
from kv_serving.server.batch_file import BatchFileError, BatchRequest, ResultFile, read_requests
from kv_serving.server.chat_protocol import ChatRequest
from kv_serving.server.completion_protocol import CompletionRequest
from kv_serving.server.delivery import collect
from kv_serving.server.endpoints import begin_chat, begin_completion
from kv_serving.server.engine_loop import EngineLoop, EngineState
from kv_serving.server.errors import ApiError, api_error_of, malformed
from kv_serving.server.limits import Limits
from kv_serving.server.responses import encode_json
from kv_serving.server.run import EngineFailedError, Loaded
from kv_serving.server.server_metrics import ServerMetrics
from kv_serving.server.service import Service

AHEAD = 2
"""Requests in hand for each that the engine runs at once, so that it never waits for the next."""


class BatchReport(NamedTuple):
    """What a run came to."""

    requests: int
    already_done: int
    failed: int


def run_batch(
    source: Path, target: Path, load: Callable[[], Loaded], name: str, progress: Callable[[int, int], None]
) -> BatchReport:
    """Answer what `target` lacks of `source`; `progress(done, of)` is called after each.

    Raises BatchFileError, and what `load` raises.
    """
    requests = read_requests(source)
    if target.exists() and source.samefile(target):
        raise BatchFileError(f"{target} is the file of requests: name another one for the results")
    with ResultFile(target) as results:
        left = [request for request in requests if request.custom_id not in results.done]
        done = len(requests) - len(left)
        progress(done, len(requests))
        failed = asyncio.run(_run(left, results, load, name, lambda more: progress(done + more, len(requests))))
    return BatchReport(len(requests), done, failed)


async def _run(
    requests: list[BatchRequest],
    results: ResultFile,
    load: Callable[[], Loaded],
    name: str,
    progress: Callable[[int], None],
) -> int:
    if not requests:
        return 0
    loaded = load()
    ready, ended = asyncio.Event(), asyncio.Event()

    def on_state(state: EngineState) -> None:
        (ready if state is EngineState.READY else ended).set()

    engine = EngineLoop(asyncio.get_running_loop(), on_state)
    engine.start(lambda: loaded.engine)
    try:
        await ready.wait()
        in_hand = AHEAD * loaded.engine.config.max_requests
        limits = Limits(max_concurrent=in_hand, max_choices=1 << 16)
        plan, metrics = loaded.engine.describe(), ServerMetrics(lambda: engine.snapshot)
        service = Service(name, loaded.model, plan, engine, limits, metrics)
        waiting, counts = iter(requests), [0, 0]

        async def work() -> None:
            for request in waiting:
                status, body = await _answer(service, request)
                if engine.state is EngineState.FAILED:
                    raise EngineFailedError(f"the engine has failed ({engine.error!r}); see the log")
                results.write(_result(request, status, body))
                counts[0] += 1
                counts[1] += status != 200
                progress(counts[0])

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(in_hand, len(requests))):
                workers.create_task(work())
        return counts[1]
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    finally:
        await asyncio.to_thread(engine.stop)


async def _answer(service: Service, request: BatchRequest) -> tuple[int, dict[str, Any]]:
    try:
        if request.url == "/v1/completions":
            completion = CompletionRequest.model_validate(request.body)
            _check(completion.streams)
            answer, shape = await begin_completion(service, completion, "")
        else:
            chat = ChatRequest.model_validate(request.body)
            _check(chat.streams)
            answer, shape = await begin_chat(service, chat, "")
        choices = await collect(answer.pieces(), answer.num_choices)
        return 200, shape.whole(choices, answer.usage)
    except ValidationError as error:
        refusal = malformed(error.errors())
    except JaxkvError as error:
        refusal = api_error_of(error)
    return refusal.status, refusal.body()


def _check(streams: bool) -> None:
    if streams:
        raise ApiError(400, "a result of a batch is no stream: leave out stream", param="stream")


def _result(request: BatchRequest, status: int, body: dict[str, Any]) -> bytes:
    identity = uuid.uuid4().hex
    return encode_json(
        {
            "id": f"batch_req_{identity}",
            "custom_id": request.custom_id,
            "response": {"status_code": status, "request_id": identity, "body": body},
            "error": None,
        }
    )
