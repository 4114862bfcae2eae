"""A schema without an answer that ends is found, and no other."""

import itertools
import sys

import pytest

from kv_serving.server.schema_check import endless_part

LEAF = {"type": "string"}


def chain(keyword: str, length: int, end: object) -> dict[str, object]:
    links = {f"a{n}": {keyword: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(length)}
    return {"$defs": {**links, f"a{length}": end}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, LEAF]},
        {"anyOf": [{"oneOf": [{"$ref": "#"}]}]},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"properties": {"a": {"properties": {"b": {"$ref": "#/properties/a"}}, "required": ["b"]}}},
        {"items": {"$ref": "#"}, "minItems": 2},
        {"$defs": {"x/y": {"$ref": "#/$defs/x~1y"}}},
        chain("allOf", 50, {"$ref": "#/$defs/a7"}),
    ],
)
def test_what_refers_to_itself_without_end_is_endless(schema: dict) -> None:
    assert endless_part(schema) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {},
        LEAF,
        {"anyOf": [{"$ref": "#"}, LEAF]},
        {"anyOf": [{"$ref": "#"}, True]},
        {"properties": {"a": {"$ref": "#"}}},
        {"properties": {"a": LEAF, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a", "next"]},
        {"items": {"$ref": "#"}},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/x"},
        {"properties": {"$ref": LEAF, "anyOf": LEAF, "required": LEAF}, "required": ["$ref", "other"]},
        {"required": "a", "allOf": 5, "anyOf": {}, "minItems": "1", "$ref": 7},
        chain("allOf", 50, LEAF),
        chain("anyOf", 50, LEAF),
    ],
)
def test_what_has_an_answer_is_not(schema: dict) -> None:
    assert endless_part(schema) is None


def calls_for(schema: dict) -> int:
    """Functions called and left while it is looked at."""
    calls = itertools.count()
    sys.setprofile(lambda *_: next(calls))
    try:
        assert endless_part(schema) is None
    finally:
        sys.setprofile(None)
    return next(calls)


def test_a_long_chain_takes_no_longer_than_it_is() -> None:
    assert endless_part(chain("allOf", 50_000, LEAF)) is None
    # Where each link followed the rest, it would be four times as many.
    assert calls_for(chain("allOf", 2000, LEAF)) < 2.1 * calls_for(chain("allOf", 1000, LEAF))
