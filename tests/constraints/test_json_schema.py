"""Schemas are closed where that loses nothing that they allow."""

from typing import Any

import pytest

from paceline.constraints import Json, json_schema, tool_calls
from paceline.constraints.json_schema import closed
from paceline.constraints.text_matcher import fits
from paceline.errors import ConstraintError
from paceline.text import FORMATS

TEXT = {"type": "string", "maxLength": 8}
ITEM = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}


def objects(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


CLOSED = {
    "itself": (ITEM, '{"a": "x", "z": 1}'),
    "in a property": (objects(properties={"i": ITEM}), '{"i": {"a": "x", "z": 1}}'),
    "in a list": (objects(properties={"i": {"type": "array", "items": ITEM}}), '{"i": [{"a": "x", "z": 1}]}'),
    "by reference": (
        objects(properties={"i": ref("I")}, **{"$defs": {"I": ITEM}}),
        '{"i": {"a": "x", "z": 1}}',
    ),
    "one of two": (
        objects(properties={"i": {"anyOf": [ref("I"), {"type": "null"}]}}, **{"$defs": {"I": ITEM}}),
        '{"i": {"a": "x", "z": 1}}',
    ),
}


@pytest.mark.parametrize("case", CLOSED)
def test_what_is_not_listed_cannot_be_written(case: str) -> None:
    schema, unlisted = CLOSED[case]
    assert fits(Json.of(schema), unlisted)
    assert not fits(Json.of(closed(schema)), unlisted)


MAX_CACHED = {
    "alternatives beside properties": (
        objects(
            properties={"a": TEXT, "b": TEXT, "c": TEXT},
            required=["a"],
            anyOf=[objects(properties={k: TEXT}, required=[k]) for k in "bc"],
        ),
        '{"a": "x", "b": "y"}',
    ),
    "alternatives that name less": (
        objects(
            properties={"kind": {"enum": ["a", "b"]}, "v": {"type": "boolean"}},
            required=["kind"],
            anyOf=[{"properties": {"kind": {"const": k}}} for k in "ab"],
        ),
        '{"kind": "a", "v": true}',
    ),
    "parts put together": (
        {"$defs": {"B": ITEM}, "allOf": [ref("B"), objects(properties={"x": TEXT}, required=["x"])]},
        '{"a": "x", "x": "y"}',
    ),
    "a reference beside properties": (
        objects(properties={"x": TEXT}, required=["x"], **{"$defs": {"B": ITEM}, "$ref": "#/$defs/B"}),
        '{"x": "y", "a": "x"}',
    ),
    "a part of a part": (
        {
            "$defs": {"B": ITEM, "C": ref("B")},
            "allOf": [ref("C"), objects(properties={"x": TEXT}, required=["x"])],
        },
        '{"a": "x", "x": "y"}',
    ),
}


@pytest.mark.parametrize("case", MAX_CACHED)
def test_what_is_listed_elsewhere_can_still_be_written(case: str) -> None:
    schema, text = MAX_CACHED[case]
    assert fits(Json.of(schema), text)
    assert fits(Json.of(closed(schema)), text)


def a_tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


@pytest.mark.parametrize(
    ("tools", "word"),
    [
        ([1], "a tool needs"),
        (["x"], "a tool needs"),
        ([a_tool(parameters=[])], "no schema of an object"),
        ([a_tool(parameters=False)], "no schema of an object"),
        ([a_tool(parameters={"type": "string"})], "no schema of an object"),
        ([a_tool(), a_tool()], "two tools are called 'f'"),
    ],
)
def test_tools_that_are_none(tools: list[Any], word: str) -> None:
    with pytest.raises(ConstraintError, match=word):
        tool_calls(tools, "auto", FORMATS["hermes"])


def test_tools_nested_without_end() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(3000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(ConstraintError, match="nested too deeply"):
        tool_calls([a_tool(parameters=deep)], "auto", FORMATS["hermes"])


@pytest.mark.parametrize("keyword", ["anyOf", "prefixItems"])
def test_a_schema_is_closed_without_a_copy_for_each_of_its_parts(
    keyword: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    class Index(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = int.__hash__

    real = json_schema.parts

    def indexed(schema: Any) -> Any:
        return (
            (key, Index(name) if isinstance(name, int) else name, part) for key, name, part in real(schema)
        )

    monkeypatch.setattr(json_schema, "parts", indexed)
    inner = {"type": "object", "properties": {"a": {}}}
    found = json_schema.closed({keyword: [inner] * 300})
    assert found == {keyword: [{**inner, "additionalProperties": False}] * 300}
    assert compared < 1000


def test_a_chain_of_references_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    real = json_schema.parts

    def counted(schema: Any) -> Any:
        nonlocal read
        read += 1
        return real(schema)

    monkeypatch.setattr(json_schema, "parts", counted)
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(300)}
    last: dict[str, Any] = {"a300": {"properties": {"x": {}}}}
    schema = {"$ref": "#/$defs/a0", "properties": {"y": {}}, "$defs": {**chain, **last}}
    assert json_schema.closed(schema) == schema  # the last one describes only a part of the object
    assert read < 2000
