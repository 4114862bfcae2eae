"""/v1/embeddings: the engine's own vectors, in OpenAI's shape, while answers go on."""

import base64
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from openai import OpenAI
from patience import HANG_S, wait_for
from server_case import Case, running_server

from kv_execution.runtime import PagedRuntime
from kv_serving.server.engine_loop import EngineLoop
from kv_serving.server.limits import Limits
from kv_serving.server.request_group import RequestGroup

TEXTS = ["the rest", "and then some more of it, one after another", "in"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with running_server(
        tmp_path_factory.mktemp("tiny"), limits=Limits(max_prompt_tokens=110), pooling="last"
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(case: Case) -> Iterator[None]:
    yield
    case.settle()


def expected(case: Case, prompts: list[list[int]]) -> np.ndarray:
    case.settle()
    return case.engine.embed(prompts, pooling="last")


def vectors(answer: dict) -> np.ndarray:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


def test_vectors_of_texts_are_those_of_the_engine(case: Case) -> None:
    prompts = [case.model.tokenizer.encode(text) for text in TEXTS]
    tokens = sum(map(len, prompts))
    answer = case.post("/v1/embeddings", input=TEXTS, model="tiny")
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    np.testing.assert_allclose(vectors(answer), expected(case, prompts), atol=1e-6)
    alone = case.post("/v1/embeddings", input=TEXTS[1])
    np.testing.assert_allclose(vectors(alone), vectors(answer)[1:2], atol=1e-6)


def test_token_ids_are_taken_as_they_are_and_more_than_there_are_rows(case: Case) -> None:
    prompts = [list(range(5, 5 + length)) for length in (3, 100, 17, 1, 64, 33, 9)]
    answer = case.post("/v1/embeddings", input=prompts)
    np.testing.assert_allclose(vectors(answer), expected(case, prompts), atol=1e-6)
    alone = case.post("/v1/embeddings", input=prompts[1])
    np.testing.assert_allclose(vectors(alone), vectors(answer)[1:2], atol=1e-6)


def test_base64_carries_the_same_numbers(case: Case) -> None:
    plain = case.post("/v1/embeddings", input=TEXTS, encoding_format="float", dimensions=64)
    packed = case.post("/v1/embeddings", input=TEXTS, encoding_format="base64", user="me")
    unpacked = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed["data"]]
    np.testing.assert_allclose(np.array(unpacked), vectors(plain), atol=1e-6)


def test_the_official_client_reads_them(case: Case) -> None:
    with OpenAI(base_url=f"{case.server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS)
    prompts = [case.model.tokenizer.encode(text) for text in TEXTS]
    np.testing.assert_allclose([each.embedding for each in answer.data], expected(case, prompts), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": []}, 400, "there is no input"),
        ({"input": ["the", ""]}, 400, "an input is empty"),
        ({"input": [[5], []]}, 400, "an input is empty"),
        ({"input": [[5]] * 2049}, 400, "there are 2049 inputs: give at most 2048"),
        ({"input": "the", "dimensions": 32}, 400, "dimensions is 32, and the model's vectors have 64"),
        ({"input": list(range(5, 116))}, 400, "the prompt has 111 tokens and may have 110"),
        ({"input": [[5], [100_000]]}, 400, "100000"),
        ({"input": "the", "model": "other"}, 404, "there is no model 'other'"),
        ({"input": "the", "encoding_format": "int8"}, 422, "encoding_format"),
        ({"input": 5}, 422, "input"),
        ({"input": "the", "stream": True}, 422, "stream"),
    ],
)
def test_what_cannot_be_embedded_is_refused(case: Case, body: dict, status: int, message: str) -> None:
    assert message in case.post("/v1/embeddings", status, **body)["error"]["message"]


def test_answers_go_on_between_the_steps_of_a_long_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run_held, submit, begun = PagedRuntime.run_held, EngineLoop.submit, itertools.count()
    submitted: list[RequestGroup] = []
    answered = threading.Event()

    def told(self: EngineLoop, group: RequestGroup) -> None:
        submit(self, group)
        submitted.append(group)

    def in_turn(self: PagedRuntime, *arguments: object) -> object:
        step = next(begun)
        if step == 2:
            wait_for(lambda: len(submitted) == 2)
        if step == 200:  # of more than 250; the answer takes 60
            assert answered.wait(HANG_S)
        return run_held(self, *arguments)  # type: ignore[arg-type]

    asked = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}
    whole = case.post("/v1/completions", **asked)["choices"][0]["text"]
    prompts = [[5 + each % 80, *range(9, 109)] for each in range(160)]
    got: list[np.ndarray] = []
    case.settle()
    monkeypatch.setattr(PagedRuntime, "run_held", in_turn)
    monkeypatch.setattr(EngineLoop, "submit", told)
    thread = threading.Thread(target=lambda: got.append(vectors(case.post("/v1/embeddings", input=prompts))))
    thread.start()
    # Rows are all the embeddings' own at first, and the next that is free is the answer's.
    wait_for(lambda: case.stats.pages_in_use > 0)
    assert case.post("/v1/completions", **asked)["choices"][0]["text"] == whole
    assert thread.is_alive()
    answered.set()
    thread.join(HANG_S)
    np.testing.assert_allclose(got[0], expected(case, prompts), atol=1e-6)


def test_a_deadline_ends_it_and_gives_its_pages_back(case: Case) -> None:
    case.post("/v1/embeddings", 408, input=[list(range(5, 105))] * 500, deadline_s=0.05)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [list(range(5, 45))] * 3}),
        ("/v1/completions", {"prompt": list(range(5, 45)), "echo": True, "logprobs": 1, "max_tokens": 0}),
    ],
)
def test_answers_go_on_while_what_a_prompt_needs_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = PagedRuntime.compiler_of

    def compiler_of(self: PagedRuntime, *arguments: object) -> Callable[[], object]:
        compile_program = original(self, *arguments)  # type: ignore[arg-type]

        def slow() -> None:
            begun.set()
            assert go_on.wait(HANG_S)
            compile_program()

        return slow

    monkeypatch.setattr(PagedRuntime, "compiler_of", compiler_of)
    with running_server(tmp_path) as case, ThreadPoolExecutor(1) as client:
        answer = client.submit(case.post, path, **body)
        assert begun.wait(HANG_S)
        for _ in range(2):
            case.post("/v1/completions", prompt=[5, 6, 7], max_tokens=5)
        assert not answer.done()
        go_on.set()
        answer.result(HANG_S)
        case.settle()


def test_a_program_that_cannot_be_compiled_fails_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiler_of(self: PagedRuntime, *arguments: object) -> Callable[[], object]:
        def fail() -> None:
            raise RuntimeError("injected: the compiler has given up")

        return fail

    with running_server(tmp_path) as case:
        with monkeypatch.context() as patch:
            patch.setattr(PagedRuntime, "compiler_of", compiler_of)
            case.post("/v1/embeddings", 500, input="the")
        case.settle()
        case.post("/v1/embeddings", input="the")
