"""Calls from free text against the schemas of their tools: any order of members, any form, bounded work."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from paceline.constraints import Compiler, OutputSpec, ToolSchemas, compiler
from paceline.text import OfferedTools
from support import examples
from support.cursors import tokenizer_with

TOKENIZER = tokenizer_with([])
COMPILER = Compiler(TOKENIZER, TOKENIZER.vocab_size)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
ROUTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/point"}},
        "end": {
            "anyOf": [
                {"$ref": "#/$defs/point"},
                {"type": "object", "properties": {"city": {"type": "string"}}},
            ]
        },
        "fast": {"type": "boolean"},
    },
    "required": ["name"],
    "$defs": {"point": POINT},
}


def offered(**schemas: Any) -> OfferedTools:
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    calls = OutputSpec(tools).unmarked_calls
    assert calls is not None
    return ToolSchemas(calls.schemas, COMPILER.checker(calls))


TOOLS = offered(route=ROUTE, now={"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("arguments", "fit"),
    [
        ({"name": "a"}, True),
        ({"fast": True, "name": "a"}, True),
        ({"stops": [{"y": 1, "x": 2}, {"x": 1, "y": 2}], "name": "a"}, True),
        ({"name": "a", "end": {"y": 1, "x": 2}}, True),
        ({"end": {"city": "b"}, "name": "a"}, True),
        ({}, False),
        ({"name": 1}, False),
        ({"name": "a", "stops": [{"x": 1}]}, False),
        ({"name": "a", "stops": {"x": 1, "y": 2}}, False),
        ({"name": "a", "other": 1}, False),
        ({"name": "a\ud800"}, False),
        ({"name": float("inf")}, False),
    ],
)
def test_arguments_fit_in_any_order_or_not_at_all(arguments: dict[str, Any], fit: bool) -> None:
    assert TOOLS.fits("route", arguments) is fit


def test_a_long_call_is_not_checked() -> None:
    """It would hold up the event loop of a server."""
    around = len('{"name": "route", "arguments": {"name": ""}}')
    longest = "a" * (compiler.MAX_CHECKED - around)
    assert TOOLS.fits("route", {"name": longest})
    assert not TOOLS.fits("route", {"name": longest + "a"})


_points = st.fixed_dictionaries({"x": st.integers(-9, 9)}, optional={"y": st.integers(-9, 9)})
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text("ab", max_size=2) | st.none(),
        "stops": st.lists(_points, max_size=2),
        "fast": st.booleans(),
    },
)


@settings(max_examples=examples(100))
@given(arguments=_arguments, order=st.randoms(use_true_random=False))
def test_a_validator_says_the_same(arguments: dict[str, Any], order: Any) -> None:
    keys = list(arguments)
    order.shuffle(keys)
    given = {key: arguments[key] for key in keys}
    assert TOOLS.fits("route", given) == Draft202012Validator(ROUTE).is_valid(given)


def test_bare_texts_get_the_types_of_the_schema() -> None:
    texts = {"name": "7", "stops": '[{"x": 1, "y": 2}]', "fast": "true", "end": "no JSON"}
    assert TOOLS.typed("route", texts) == {
        "name": "7",
        "stops": [{"x": 1, "y": 2}],
        "fast": True,
        "end": "no JSON",
    }


def test_a_schema_that_refers_to_itself_is_followed_for_a_while_only() -> None:
    wide = {"anyOf": [{"$ref": "#/$defs/a"}] * 4}
    schema = json.dumps({"type": "object", "properties": {"v": {"$ref": "#/$defs/a"}}, "$defs": {"a": wide}})
    tools = ToolSchemas({"f": schema}, lambda text: True)
    assert not tools.fits("f", {"v": {"w": 1}})
    assert tools.fits("f", {"v": 1})
