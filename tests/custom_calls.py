"""The custom calls of a lowered module, read off its text."""

import re
from typing import NamedTuple

import jax

CALL = re.compile(
    r"stablehlo\.custom_call @(?P<target>[\w.]+)\((?P<operands>[^)]*)\) \{(?P<attributes>.*)\} : "
    r"\((?P<operand_types>[^)]*)\) -> (?P<result_types>.*?)(?: loc\(.*)?$"
)
ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")


class CustomCall(NamedTuple):
    """Types are like `24x2x16xf16`; attributes like `0 : i64`; aliases from operand to result."""

    target: str
    operands: list[str]
    results: list[str]
    attributes: dict[str, str]
    aliases: dict[int, int]


def custom_calls(lowered: jax.stages.Lowered, prefix: tuple[str, ...]) -> list[CustomCall]:
    """Calls of targets that begin with one of `prefix`, in the order of the text."""
    found = (CALL.search(line) for line in lowered.as_text().splitlines() if "stablehlo.custom_call" in line)
    return [
        CustomCall(
            target=match["target"],
            operands=re.findall(r"tensor<([^>]*)>", match["operand_types"]),
            results=re.findall(r"tensor<([^>]*)>", match["result_types"]),
            attributes=_config(match["attributes"]),
            aliases={int(operand): int(result or 0) for result, operand in ALIAS.findall(match["attributes"])},
        )
        for match in found
        if match and match["target"].startswith(prefix)
    ]


def _config(attributes: str) -> dict[str, str]:
    start = attributes.index("mhlo.backend_config = {") + len("mhlo.backend_config = {")
    pairs = re.findall(
        r'(\w+) = (array<[^>]*>|dense<[^>]*> : tensor<[^>]*>|"[^"]*"|[^,}]*)',
        attributes[start : _end(attributes, start)],
    )
    return dict(pairs)


def _end(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise AssertionError("unbalanced attributes")
