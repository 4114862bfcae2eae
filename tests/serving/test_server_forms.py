"""Answers with a form: JSON of a schema, and calls of tools."""

import dataclasses
import json
import threading
from collections.abc import Iterator

import pytest
from patience import HANG_S
from server_case import ENGINE, Case, running_server

from kv_serving.server import grammars

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


def nested(keyword: str, depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: [schema]}
    return schema


def with_parameters(parameters: dict[str, object]) -> dict[str, object]:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


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


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_cut_off_is_text_and_no_call(case: Case, stream: bool) -> None:
    asked = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 25, "temperature": 0}
    if stream:
        parts = [part for event in case.stream("/v1/chat/completions", **asked) for part in event["choices"]]
        assert not any("tool_calls" in part["delta"] for part in parts)
        content, reason = "".join(part["delta"].get("content", "") for part in parts), parts[-1]["finish_reason"]
    else:
        (choice,) = case.post("/v1/chat/completions", **asked)["choices"]
        assert "tool_calls" not in choice["message"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
    assert content.startswith("<tool_call>\n")
    assert reason == "length"


def test_parameters_of_a_tool_may_refer_to_their_own_definitions(case: Case) -> None:
    parts = {"word": {"enum": ["a", "b"]}, "words": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2}}
    parameters = {"type": "object", "properties": {"w": {"$ref": "#/$defs/words"}}, "required": ["w"]}
    parameters |= {"additionalProperties": False, "$defs": parts, "$id": "https://example.com/f"}
    asked = {**with_parameters(parameters), "max_tokens": 120, "temperature": 1.0, "seed": 3}
    (choice,) = case.post("/v1/chat/completions", messages=CHAT, **asked)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])["w"]) <= {"a", "b"}


def test_one_of_several_types_is_taken_for_any_of_them(case: Case) -> None:
    kinds = {kind: {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"}
    kinds = {kind: {**schema, "additionalProperties": False} for kind, schema in kinds.items()}
    form = looping({"$defs": kinds, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]})
    asked = {"messages": CHAT, "response_format": form, "max_tokens": 80, "temperature": 1.0, "seed": 2}
    (choice,) = case.post("/v1/chat/completions", **asked)["choices"]
    assert json.loads(choice["message"]["content"])["kind"] in "ab"


@pytest.mark.parametrize("stream", [True, False])
def test_a_form_that_is_too_much_for_its_parser_ends_in_an_error(case: Case, stream: bool) -> None:
    form = looping({"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(3000)}})
    asked = {"messages": CHAT, "response_format": form, "max_tokens": 80}
    if stream:
        response = case.http.post("/v1/chat/completions", json={**asked, "stream": True})
        # The form gives out at the second token: by then the stream may have begun, or not.
        begun = response.headers["content-type"].startswith("text/event-stream")
        assert response.status_code == (200 if begun else 400)
        last = response.text.split("\n\n")[-3].removeprefix("data: ") if begun else response.text
        error = json.loads(last)["error"]
    else:
        error = case.post("/v1/chat/completions", 400, **asked)["error"]
    assert "the form is too much to keep to" in error["message"]


def test_nobody_waits_for_a_compiler_without_end(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(grammars, "COMPILE_S", 0.05)
    monkeypatch.setattr(grammars.Grammars, "_compile", lambda *_: go_on.wait(HANG_S))
    form = looping(nested("anyOf", 7))
    error = case.post("/v1/chat/completions", 400, messages=CHAT, response_format=form)["error"]
    go_on.set()
    assert error["message"] == "the form takes more than 0.05 s to compile: simplify it"


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
        ({"response_format": looping({"allOf": [{"$ref": "#"}]})}, 400, "refers to itself without end"),
        (
            {
                "response_format": looping(
                    {"allOf": [{"anyOf": [{"$ref": "#/$defs/a"}]}], "$defs": {"a": {"oneOf": [{"$ref": "#"}]}}}
                )
            },
            400,
            "refers to itself without end",
        ),
        (
            {
                "response_format": looping(
                    {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}, "required": ["a"], "type": "object"}
                )
            },
            400,
            "refers to itself without end",
        ),
        (
            {"response_format": looping({"type": "array", "items": {"$ref": "#"}, "minItems": 1})},
            400,
            "refers to itself without end",
        ),
        ({"response_format": looping({"$ref": "#/$defs/no"})}, 400, "Pointer '/$defs/no' does not exist"),
        ({"response_format": looping({"not": {}})}, 400, "Unimplemented keys"),
        *(
            ({"response_format": looping(nested(keyword, depth))}, 400, "nested too deeply")
            for keyword in ("allOf", "anyOf")
            for depth in (70, 300)
        ),
        (with_parameters({"$ref": "#"}), 400, "refers to itself without end"),
        (with_parameters({"type": "no"}), 400, "the form cannot be kept to: Invalid type: no"),
        (with_parameters({"anyOf": [{"$ref": "#"}]}), 400, "refers to itself without end"),
        (with_parameters(nested("anyOf", 70)), 400, "recursion limit exceeded"),
        (with_parameters(nested("anyOf", 300)), 400, "nested too deeply"),
        ({"response_format": {"type": "xml"}}, 422, "response_format"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, 400, "leave out min_tokens"),
        ({"tool_choice": "required"}, 400, "tool_choice asks for a tool"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, 400, "tool_choice asks"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(case: Case, body: dict[str, object], status: int, message: str) -> None:
    assert message in case.post("/v1/chat/completions", status, messages=CHAT, **body)["error"]["message"]
