"""The official client works unchanged, and what it gets has the fields that its own types call for, and few others."""

import dataclasses
import json
from collections.abc import Iterator

import openai
import pydantic
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from server_case import ENGINE, Case, running_server

CHAT = [{"role": "user", "content": "the rest"}]
PARAMETERS = {
    "type": "object",
    "properties": {"near": {"type": "boolean"}},
    "required": ["near"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]


class Verdict(pydantic.BaseModel):
    good: bool


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    config = dataclasses.replace(ENGINE, max_context=512)
    with running_server(tmp_path_factory.mktemp("tiny"), config=config) as running:
        yield running


@pytest.fixture(scope="module")
def client(case: Case) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{case.server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def unknown_fields(value: object) -> set[str]:
    """The fields anywhere in an answer that OpenAI's types do not have."""
    if isinstance(value, list):
        return set().union(*map(unknown_fields, value))
    if isinstance(value, pydantic.BaseModel):
        known = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or ()).union(*map(unknown_fields, known))
    return set()


def check(type_: type[pydantic.BaseModel], body: object, more: tuple[str, ...] = ()) -> None:
    """Each field is there, in its own type, and none but `more` beside those that OpenAI has."""
    assert unknown_fields(type_.model_validate_json(json.dumps(body), strict=True)) <= set(more)


@pytest.mark.parametrize(
    ("path", "type_", "body"),
    [
        ("/v1/completions", Completion, {"prompt": "the", "logprobs": 2, "n": 2}),
        ("/v1/chat/completions", ChatCompletion, {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/chat/completions", ChatCompletion, {"messages": CHAT, "tools": TOOLS, "tool_choice": "required"}),
    ],
)
def test_whole_answers_have_every_field_in_its_own_type(
    case: Case, path: str, type_: type[pydantic.BaseModel], body: dict[str, object]
) -> None:
    check(type_, case.post(path, max_tokens=60, temperature=1.0, seed=1, **body), ("stop_reason",))


@pytest.mark.parametrize(
    "body", [{"logprobs": True, "top_logprobs": 1}, {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}]
)
def test_chunks_have_every_field_in_its_own_type(case: Case, body: dict[str, object]) -> None:
    asked = {"messages": CHAT, "max_tokens": 4, "stream_options": {"include_usage": True}, **body}
    for chunk in case.stream("/v1/chat/completions", **asked):
        check(ChatCompletionChunk, chunk, ("stop_reason",))


def test_chunks_of_completions_have_every_field_in_its_own_type(case: Case) -> None:
    *chunks, last, usage = case.stream(
        "/v1/completions",
        prompt="the",
        max_tokens=4,
        ignore_eos=True,
        logprobs=1,
        stream_options={"include_usage": True},
    )
    check(Completion, last, ("stop_reason",))
    check(Completion, usage)
    for chunk in chunks:
        assert chunk["choices"][0]["finish_reason"] is None  # as OpenAI's own do, whatever the type says
        chunk["choices"][0]["finish_reason"] = "stop"
        check(Completion, chunk, ("stop_reason",))


def test_models_embeddings_and_errors_have_every_field_in_its_own_type(case: Case) -> None:
    listed = case.http.get("/v1/models").json()
    assert (set(listed), listed["object"]) == ({"object", "data"}, "list")
    for card in (*listed["data"], case.http.get("/v1/models/tiny").json()):
        check(Model, card, ("parent", "max_model_len"))
    check(CreateEmbeddingResponse, case.post("/v1/embeddings", input=["the", "rest"]))
    for status, body in ((400, {"prompt": ""}), (404, {"prompt": "x", "model": "y"}), (422, {}), (422, {"prompt": 1})):
        error = case.post("/v1/completions", status, **body)
        assert set(error) == {"error"}
        check(ErrorObject, error["error"])
    assert case.http.get("/v1/nowhere").json().keys() == {"error"}


def test_a_stream_is_read_to_its_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_schema_comes_back_as_its_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=CHAT, max_tokens=90, response_format=Verdict)
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_a_call_is_put_together_from_a_stream(client: openai.OpenAI) -> None:
    asked = {"messages": CHAT, "max_tokens": 120, "tools": TOOLS, "tool_choice": "required", "seed": 1}
    with client.chat.completions.stream(model="tiny", parallel_tool_calls=False, **asked) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "look"
    assert pydantic.TypeAdapter(dict[str, bool]).validate_json(call.function.arguments).keys() == {"near"}


def test_failures_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    for body, error in (
        ({"model": "other"}, openai.NotFoundError),
        ({"model": "tiny", "temperature": -1}, openai.BadRequestError),
        ({"model": "tiny", "extra_body": {"unknown": 1}}, openai.UnprocessableEntityError),
    ):
        with pytest.raises(error):
            client.chat.completions.create(messages=CHAT, **body)
