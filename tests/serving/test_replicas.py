"""Two replicas on this machine: prompts go where they are cached, and on when a replica dies."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from patience import wait_for
from replica_case import served
from server_case import ENGINE
from tiny_model import write_tiny_model

from kv_execution import PagedEngine, SamplingParams
from models import load_model

pytestmark = pytest.mark.slow
OPTIONS = (
    "--replicas=2 --served-name=tiny --kv-pool-bytes=1MiB --max-requests=4 --max-step-tokens=64 --max-context=128 "
    "--no-warm-up --no-compilation-cache --max-body=8MiB --drain=2 --api-key=sesame --api-key=other"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    log = tmp_path_factory.mktemp("log") / "log"
    with served(model, OPTIONS, log, headers={"authorization": "Bearer sesame"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: tuple[httpx.Client, psutil.Process]) -> httpx.Client:
    return server[0]


def prompt_of(number: int) -> list[int]:
    return [number, *range(100, 180)]


def ask(client: httpx.Client, prompt: list[int], **headers: str) -> tuple[str, int, str]:
    """The replica, the cached tokens, and the text."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    response = client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return response.headers["x-replica"], cached, answer["choices"][0]["text"]


def test_a_prompt_goes_where_it_is_cached_and_answers_as_one_engine(client: httpx.Client, model: Path) -> None:
    prompts = [prompt_of(number) for number in range(20, 26)]
    first = [ask(client, prompt) for prompt in prompts]
    assert [cached for _, cached, _ in first] == [0] * 6
    places = [replica for replica, _, _ in first]
    assert [ask(client, prompt)[:2] for prompt in prompts] == [(place, 80) for place in places]
    # What was sent where is forgotten by the second look at a cache that has changed; from then on it has to tell.
    for number in range(3):
        for filler in range(8):
            ask(client, [200 + number, *range(20 + filler, 40 + filler)])
        time.sleep(1.2)
    engine = PagedEngine(load_model(model), ENGINE)
    engine.init_paged_runtime()
    results = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    for result, prompt, place in zip(results, prompts, places, strict=True):
        known = [token for token in result.tokens if token < engine.model.tokenizer.vocab_size]
        assert ask(client, prompt)[2] == engine.model.tokenizer.decode(known)
        for longer in ([*prompt, 7], [*prompt, 9, 8]):
            replica, cached, _ = ask(client, longer)
            assert (replica, cached >= 80) == (place, True)


def test_prompts_find_their_cache_while_others_are_answered(client: httpx.Client) -> None:
    def turns(number: int) -> list[tuple[str, int]]:
        prompt = [number, *range(90, 170)]
        return [ask(client, [*prompt, turn])[:2] for turn in range(5, 13)]

    with ThreadPoolExecutor(4) as clients:
        for places in clients.map(turns, range(60, 72)):
            assert len({place for place, _ in places}) == 1
            assert [cached for _, cached in places] == [0] + [80] * 7


def test_a_stream_is_the_whole_answer(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "the rest"}], "max_tokens": 30, "seed": 3, "temperature": 1.0}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        *lines, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines) == whole


def test_tenants_share_nothing_and_strangers_get_nothing(client: httpx.Client) -> None:
    assert [ask(client, prompt_of(30))[1] for _ in range(2)] == [0, 80]
    assert ask(client, prompt_of(30), authorization="Bearer other")[1] == 0
    refused = client.post("/v1/completions", json={"prompt": [5]}, headers={"authorization": "Bearer no"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_what_is_refused_says_so_as_on_one_server(client: httpx.Client) -> None:
    assert client.post("/v1/completions", json={"prompt": []}).json()["error"]["param"] == "prompt"
    broken = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    too_large = client.post("/v1/completions", json={"prompt": [5], "user": "x" * 9_000_000})
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/ready").json() == {"status": "ready"}


def test_a_body_may_be_as_large_as_the_limit_says(client: httpx.Client) -> None:
    body = {"prompt": [5], "max_tokens": 1, "user": "x" * 8_000_000}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_each_response_has_one_id_and_embeddings_are_served_too(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={"input": ["the", "rest"]}, headers={"x-request-id": "mine"})
    assert len(response.json()["data"]) == 2
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_a_client_that_goes_away_frees_its_place(client: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "n": 100, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    replica, aborted = response.headers["x-replica"], 'jaxkv:request_success_total{finished_reason="abort"}'

    def told() -> bool:
        metrics = client.get("/metrics")
        return metrics.headers["x-replica"] == replica and aborted in metrics.text

    wait_for(told)


def test_what_a_dead_replica_had_goes_to_the_other_and_nobody_waits_in_vain(
    server: tuple[httpx.Client, psutil.Process],
) -> None:
    client, process = server
    places: dict[str, list[int]] = {}
    for number in range(40, 80):
        places.setdefault(ask(client, prompt_of(number))[0], prompt_of(number))
        if len(places) == 2:
            break
    names = {each: " ".join(each.cmdline()) for each in process.children(recursive=True)}
    replicas = [each for each, name in names.items() if "ServeReplica:jaxkv:replica" in name]
    assert len(replicas) == 2
    answers: list[httpx.Response] = []
    killed = threading.Event()

    def load() -> None:
        more = 10
        while more:
            more -= killed.is_set()
            answers.append(client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 40}))

    with ThreadPoolExecutor(8) as clients:
        under_load = [clients.submit(load) for _ in range(8)]
        wait_for(lambda: len(answers) > 30)
        replicas[0].kill()
        killed.set()
        for each in under_load:
            each.result()
    assert {answer.status_code for answer in answers} <= {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("unavailable", "1")
    assert sum(answer.status_code == 200 for answer in answers[-60:]) == 60
    (lost,) = [place for place, prompt in places.items() if ask(client, prompt)[1] == 0]
    replica, cached, _ = ask(client, places[lost])
    assert (replica != lost, cached) == (True, 80)
