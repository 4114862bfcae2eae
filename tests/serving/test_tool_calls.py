"""Calls of tools are found in text, however it is cut, and nothing of the text is lost."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_serving.server.tool_call_reader import ToolCallReader
from kv_serving.server.tool_formats import FORMATS, HERMES, LLAMA3, MISTRAL, Call, ToolFormat, format_of_template

WEATHER = Call("weather", '{"city": "Rome"}')
TIME = Call("time", "{}")


def read(notation: ToolFormat, pieces: list[str]) -> tuple[str, list[Call]]:
    reader, text, calls = ToolCallReader(notation), "", []
    for part in [*(reader.push(piece) for piece in pieces), reader.finish()]:
        text += part.text
        calls += part.calls
    assert reader.found == bool(calls)
    return text, calls


CASES = [
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "", [WEATHER]),
    (
        HERMES,
        'Let me see.\n<tool_call>{"name":"weather","arguments":{"city": "Rome"}}</tool_call>\n'
        '<tool_call>{"name": "time"}</tool_call>\n',
        "Let me see.",
        [WEATHER, TIME],
    ),
    (HERMES, '<tool_call>{"name": "time"}', "", [TIME]),
    (HERMES, "a <tool_call>not json</tool_call> b", "a<tool_call>not json</tool_call> b", []),
    (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time"}]',
        "",
        [WEATHER, TIME],
    ),
    (MISTRAL, "a [list] of [TOOL", "a [list] of [TOOL", []),
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Rome"}}', "", [WEATHER]),
    (
        LLAMA3,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time"}',
        "",
        [WEATHER, TIME],
    ),
    (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3, 'It is {"name": "time"}', 'It is {"name": "time"}', []),
]


@pytest.mark.parametrize(("notation", "text", "rest", "calls"), CASES)
def test_calls_are_read_and_text_is_kept(notation: ToolFormat, text: str, rest: str, calls: list[Call]) -> None:
    assert read(notation, [text]) == (rest, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 100)))
def test_how_the_text_was_cut_makes_no_difference(case: tuple, cuts: list[int]) -> None:
    notation, text, rest, calls = case
    ends = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    assert read(notation, [text[a:b] for a, b in itertools.pairwise(ends)]) == (rest, calls)


@given(st.sampled_from(sorted(FORMATS)), st.text('<tool_cal>/{}[]TOOL_CALLS" x\n'), st.integers(0, 20))
def test_without_a_call_nothing_but_space_is_lost(name: str, text: str, cut: int) -> None:
    got, calls = read(FORMATS[name], [text[:cut], text[cut:]])
    assert calls == []
    assert "".join(got.split()) == "".join(text.split())


def test_the_template_tells_the_notation() -> None:
    assert format_of_template("{{ messages }}") is None
    assert format_of_template("{% if tools %}<tool_call>") is HERMES
    assert format_of_template("{% if tools %}[TOOL_CALLS]") is MISTRAL
    assert format_of_template('{% if tools %}{"name": name, "parameters": {}}') is LLAMA3


def test_arguments_that_are_text_already_stay_as_they_are() -> None:
    body = json.dumps({"name": "time", "arguments": '{"zone": "x"}'})
    assert HERMES.calls_of(body) == [Call("time", '{"zone": "x"}')]
