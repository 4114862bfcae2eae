"""Answers with a form: JSON of a schema, and calls of tools."""

import dataclasses
import json
from collections.abc import Iterator

import pytest
from server_case import ENGINE, Case, running_server

WRONG = {"name": "x", "schema": {"type": "no"}}
CHAT = [{"role": "user", "content": "the rest"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "good": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
        "size": {"type": "integer", "maximum": 9},
    },
    "required": ["good", "kind"],
    "additionalProperties": False,
}


def tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    function = {"name": name, "parameters": {**parameters, "additionalProperties": False}}
    return {"type": "function", "function": function}


def looping(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


TOOLS = [tool("near"), tool("far")]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    config = dataclasses.replace(ENGINE, max_context=512)
    with running_server(tmp_path_factory.mktemp("tiny"), config=config) as running:
        yield running
        running.settle()


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_json_of_the_schema(case: Case, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    asked = {"messages": CHAT, "max_tokens": 80, "temperature": 1.0, "seed": seed, "response_format": form, "n": 2}
    answer = case.post("/v1/chat/completions", **asked)
    for choice in answer["choices"]:
        value = json.loads(choice["message"]["content"])
        assert set(value) <= {"good", "kind", "size"}
        assert isinstance(value["good"], bool)
        assert value["kind"] in ("a", "b")
        assert choice["finish_reason"] == "stop"
    events = case.stream("/v1/chat/completions", **asked)
    text = "".join(
        part["delta"].get("content", "") for event in events for part in event["choices"] if part["index"] == 0
    )
    assert text == answer["choices"][0]["message"]["content"]


def test_an_answer_is_the_beginning_of_any_json_object(case: Case) -> None:
    answer = case.post("/v1/chat/completions", messages=CHAT, max_tokens=20, response_format={"type": "json_object"})[
        "choices"
    ][0]
    assert answer["message"]["content"].lstrip().startswith("{")


def test_a_schema_may_refer_to_itself_within_its_answer(case: Case) -> None:
    form = looping({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False})
    asked = {"max_tokens": 200, "temperature": 1.0, "seed": 1, "response_format": form}
    (choice,) = case.post("/v1/chat/completions", messages=CHAT, **asked)["choices"]
    assert choice["message"]["content"].startswith("{")


def test_others_are_not_held_to_it(case: Case) -> None:
    plain = case.post("/v1/chat/completions", messages=CHAT, max_tokens=20, response_format={"type": "text"})
    assert (
        plain["choices"][0]["message"]["content"]
        == case.post("/v1/chat/completions", messages=CHAT, max_tokens=20)["choices"][0]["message"]["content"]
    )


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"near", "far"}), ({"type": "function", "function": {"name": "far"}}, {"far"})],
)
def test_a_tool_is_called(case: Case, choice: object, names: set[str]) -> None:
    asked = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 90}
    asked |= {"temperature": 1.0, "seed": 5}
    answer = case.post("/v1/chat/completions", **asked)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    name = call["function"]["name"]
    assert name in names
    assert set(json.loads(call["function"]["arguments"])) == {name}
    assert call["type"] == "function"
    parts = [part for event in case.stream("/v1/chat/completions", **asked) for part in event["choices"]]
    (streamed,) = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert streamed["function"] == call["function"]
    assert streamed["index"] == 0
    assert parts[-1]["finish_reason"] == "tool_calls"


def test_a_conversation_with_calls_and_results_is_rendered(case: Case) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "near", "arguments": '{"near": true}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "call_1", "content": "yes"}]
    answer = case.post("/v1/chat/completions", messages=messages, tools=TOOLS, tool_choice="auto", max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            400,
            "Invalid type",
        ),
        ({"response_format": looping({"$ref": "#"})}, 400, "refers to itself without end"),
        (
            {
                "response_format": looping(
                    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
                )
            },
            400,
            "refers to itself without end",
        ),
        (
            {
                "response_format": looping(
                    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
                )
            },
            400,
            "refers to itself without end",
        ),
        ({"response_format": looping({"anyOf": [{"$ref": "#"}]})}, 400, "refers to itself without end"),
        ({"response_format": {"type": "xml"}}, 422, "response_format"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, 400, "leave out min_tokens"),
        ({"tool_choice": "required"}, 400, "tool_choice asks for a tool"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, 400, "tool_choice asks"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(case: Case, body: dict[str, object], status: int, message: str) -> None:
    assert message in case.post("/v1/chat/completions", status, messages=CHAT, **body)["error"]["message"]
