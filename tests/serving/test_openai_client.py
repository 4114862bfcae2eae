"""The official client works unchanged, and what it gets has the fields that its own types call for."""

import dataclasses
from collections.abc import Iterator

import openai
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
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
    response = case.http.post(path, json={"max_tokens": 60, "temperature": 1.0, "seed": 1, **body})
    assert response.status_code == 200
    type_.model_validate_json(response.content, strict=True)


def test_chunks_have_every_field_in_its_own_type(case: Case) -> None:
    for chunk in case.stream(
        "/v1/chat/completions", messages=CHAT, max_tokens=4, logprobs=True, stream_options={"include_usage": True}
    ):
        ChatCompletionChunk.model_validate(chunk)


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
