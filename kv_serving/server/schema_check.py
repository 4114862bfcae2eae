"""Whether a JSON schema has an answer that ends: what refers to itself without a way out has none.

Contract: a schema is *finite* once each of the parts that any answer must have is: what `$ref` stands for, all of
`allOf`, one of `anyOf` or `oneOf`, properties that are required, items of arrays that may not be empty. That is worked
out from the leaves up, in time linear in the schema; what is never reached is endless. Other keywords count as leaves,
as do references that lead nowhere, which a compiler will name.
"""

import urllib.parse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any


def endless_part(schema: Mapping[str, Any]) -> str | None:
    """A description of a part of `schema` that refers to itself without end; None where there is none."""
    found = list({id(part): part for part in _schemas(schema)}.values())  # Python may have one object in two places
    waits_for: dict[int, int] = {}
    waiting: defaultdict[int, list[tuple[int, list[bool]]]] = defaultdict(list)
    finite = []
    for part in found:
        groups = [group for group in _needs(schema, part) if True not in group]
        waits_for[id(part)] = len(groups)
        for group in groups:
            open_group = [True]  # shared by its alternatives, of which the first that is finite closes it
            for alternative in group:
                waiting[id(alternative)].append((id(part), open_group))
        if not groups:
            finite.append(id(part))
    while finite:
        for part_id, open_group in waiting.pop(finite.pop(), ()):
            if open_group[0]:
                open_group[0] = False
                waits_for[part_id] -= 1
                if not waits_for[part_id]:
                    finite.append(part_id)
    endless = next((part for part in found if waits_for[id(part)]), None)
    if endless is None:
        return None
    reference = endless.get("$ref")
    return f"the $ref {reference[:100]!r}" if isinstance(reference, str) else "the form"


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in it, also those that are no schemas, which do no harm."""
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            yield node
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)


def _needs(schema: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Groups of parts of which an answer to `part` needs one each; True stands for what is finite for certain."""
    if isinstance(reference := part.get("$ref"), str):
        yield [_or_true(_referred(schema, reference))]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(alternatives := part.get(keyword), list) and alternatives:
            yield [_or_true(each) for each in alternatives]
    if isinstance(parts := part.get("allOf"), list):
        yield from ([_or_true(each)] for each in parts)
    properties, required = part.get("properties"), part.get("required")
    if isinstance(properties, Mapping) and isinstance(required, list):
        yield from ([_or_true(properties.get(name))] for name in required if isinstance(name, str))
    least = part.get("minItems")
    if isinstance(least, int) and least > 0 and not part.get("prefixItems"):
        yield [_or_true(part.get("items"))]


def _or_true(part: Any) -> Any:
    return part if isinstance(part, Mapping) else True


def _referred(schema: Mapping[str, Any], reference: str) -> Any:
    """What a `$ref` within `schema` stands for; None where it leads elsewhere."""
    node: Any = schema if reference.startswith("#") else None
    for part in urllib.parse.unquote(reference).split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node
