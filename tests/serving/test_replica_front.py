"""The front over replicas that die, or have no room, without a cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

# Ray's own, when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

HEAD = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.response.body", "body": b"ok", "more_body": False}


class Answer:
    """The messages of a replica, or how it ends; none at all where there are no parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[list[Any]]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield [part]
        if not self.parts:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled = True


class Method:
    """A method of a handle."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    def options(self, *, stream: bool) -> "Method":
        assert stream
        return self

    def remote(self, request: Any, **given: Any) -> Any:
        return self.results.pop(0)


class Replicas:
    """A handle."""

    def __init__(self, *answers: Any) -> None:
        self.chain = Method()
        self.answer = Method(*answers)


def call(replicas: Any, *, gone: bool = False) -> list[dict[str, Any]]:
    """What a client is sent for a GET, which needs no chain."""
    from kv_serving.replicas.front import Front

    sent: list[dict[str, Any]] = []
    unread = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        if gone:
            return {"type": "http.disconnect"}
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": [], "client": None}
    asyncio.run(Front(replicas)(scope, receive, send))
    return sent


def died() -> Exception:
    from ray.exceptions import RayActorError

    return RayActorError()


def test_a_request_whose_replica_dies_before_its_answer_goes_to_another() -> None:
    first = Answer(died())
    assert call(Replicas(first, Answer(HEAD, BODY))) == [HEAD, BODY]
    assert first.cancelled


def test_one_that_has_begun_is_not_begun_again() -> None:
    replicas = Replicas(Answer(HEAD, died()), Answer(HEAD, BODY))
    with pytest.raises(type(died())):
        call(replicas)
    assert len(replicas.answer.results) == 1


def test_after_three_deaths_the_client_is_told() -> None:
    head, body = call(Replicas(*(Answer(died()) for _ in range(3))))
    assert head["status"] == 503
    assert (b"retry-after", b"1") in head["headers"]
    assert json.loads(body["body"])["error"]["code"] == "unavailable"


def test_without_room_the_client_is_told_to_come_back() -> None:
    from ray.serve.exceptions import BackPressureError

    head, _ = call(Replicas(Answer(BackPressureError(num_queued_requests=5, max_queued_requests=5))))
    assert head["status"] == 429


def test_scaling_is_given_to_ray_only_where_it_is_asked_for() -> None:
    from kv_serving.replicas.app import Scaling, ScalingError

    assert Scaling(replicas=2, max_replicas=2).options() == {"num_replicas": 2}
    scaling = Scaling(replicas=1, max_replicas=4, target_requests=7).options()["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 7)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30, 600)
    with pytest.raises(ScalingError, match="3 replicas and at most 2"):
        Scaling(replicas=3, max_replicas=2)


def test_a_client_that_goes_away_cancels_its_answer() -> None:
    answer = Answer()
    assert call(Replicas(answer), gone=True) == []
    assert answer.cancelled
