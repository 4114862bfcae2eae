"""How models write calls of tools in their text, in the three notations that are in use.

`hermes` (Hermes, Qwen): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times between other
text. `mistral`: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` to the end. `llama3`: an answer that is nothing
but `{"name": ..., "parameters": {...}}`, or several of these with semicolons between them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class CallForm(NamedTuple):
    """Calls as a grammar: `start` in Lark's notation, in which `call` is JSON of the schema `call`."""

    start: str
    call: dict[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """One notation.

    opening: what calls begin with; "" where an answer that begins with `{` is one. closing: what they end with; "" for
    the end of the answer. arguments: the field of a call's arguments. listed: whether the calls are a JSON array.
    """

    name: str
    opening: str
    closing: str
    arguments: str
    listed: bool

    def calls_of(self, body: str) -> list[Call] | None:
        """The calls that stand between opening and closing; None where it is none."""
        decoder, calls, rest = json.JSONDecoder(), [], body.strip()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
            for entry in value if isinstance(value, list) else [value]:
                call = self._call(entry)
                if call is None:
                    return None
                calls.append(call)
        return calls or None

    def form(self, tools: Sequence[Mapping[str, Any]], opening_token: int | None, *, several: bool) -> CallForm:
        """An answer that is one call of one of these functions, or `several`.

        `opening_token` is the id of the token that is spelled as `opening`.
        """
        schemas = [_call_schema(tool, self.arguments, number) for number, tool in enumerate(tools)]
        one: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        opening = "" if not self.opening else json.dumps(self.opening)
        if opening_token is not None:
            opening = f"<[{opening_token}]>"
        if self.listed:
            one = {"type": "array", "items": one, "minItems": 1, **({} if several else {"maxItems": 1})}
            start = f"{opening} call"
        elif self.closing:
            start = f'{opening} "\\n" call "\\n" {json.dumps(self.closing)}'
            start = f'({start}) ("\\n" {start})*' if several else start
        else:
            start = 'call (";" call)*' if several else "call"
        given = (tool.get("parameters") or {"type": "object"} for tool in tools)
        return CallForm(start, {**one, "$defs": {str(n): _moved(each, f"#/$defs/{n}") for n, each in enumerate(given)}})

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get(self.arguments, value.get("arguments", value.get("parameters", {})))
        if isinstance(arguments, str):
            return Call(value["name"], arguments)
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", listed=False)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", listed=True)
LLAMA3 = ToolFormat("llama3", "", "", "parameters", listed=False)
FORMATS = {each.name: each for each in (HERMES, MISTRAL, LLAMA3)}


def format_of_template(source: str) -> ToolFormat | None:
    """The notation that a chat template teaches its model; None where it knows no tools."""
    if "tools" not in source:
        return None
    for each in (HERMES, MISTRAL):
        if each.opening in source:
            return each
    return LLAMA3 if '"parameters"' in source else HERMES


def _call_schema(tool: Mapping[str, Any], arguments: str, number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, arguments: {"$ref": f"#/$defs/{number}"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references within itself hold where it stands at the pointer `to` of a larger one."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # Under a base of its own they would not be found from where it was.
    moved = {name: _moved(each, to) for name, each in schema.items() if name != "$id" or not isinstance(each, str)}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved
