"""What a user asks for is what is enforced, whatever characters it holds."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints import Choice, Json, Lark, Regex, Whitespace, check, response_format
from paceline.constraints.grammars import MAX_BYTES, RequestPart, after
from paceline.constraints.text_matcher import fits
from paceline.errors import ConstraintError
from support import examples
from support.legal_walks import legal_texts

ODD = [
    "\x00",
    "\x01",
    "\t",
    "\n",
    "\r",
    "\x7f",
    "\x85",
    "\u2028",
    "\\",
    '"',
    "'",
    "/",
    "é",
    "\U0001f600",
    "a\\nb",
]


@pytest.mark.parametrize(
    "text", [*ODD, "".join(ODD), "<[12]>", "<eos>", "$", "%json", "x: y", "// no comment"]
)
def test_a_choice_is_taken_literally(text: str) -> None:
    assert fits(Choice((text, "other")), text)
    assert fits(Choice((text, "other")), "other")
    assert not fits(Choice((text, "other")), text + " ")


@settings(max_examples=examples(50))
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6))
def test_any_text_can_be_a_choice_or_a_pattern(text: str) -> None:
    assert fits(Choice((text,)), text)
    assert fits(Regex(re.escape(text)), text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^ab$", ["ab"], ["ab\n", "xab", "$"]),
        (r"\Aab\Z", ["ab"], ["abZ", "ab\n"]),
        (r"ab\z", ["ab"], ["abz"]),
        (r"a\\Z", ["a\\Z"], ["a\\", "a"]),
        (r"a\\\Z", ["a\\"], ["a\\Z"]),
        (r"a\$", ["a$"], ["a"]),
        (r"a\\$", ["a\\"], ["a\\$"]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("a/b", ["a/b"], ["a\\/b"]),
        (r"a\/b", ["a/b"], ["a\\/b"]),
        ("[/]", ["/"], ["[/]"]),
        ("a\nb", ["a\nb"], ["anb", "a\\nb"]),
        ("a\\\nb", ["a\nb"], ["a\\nb"]),
        (r"a\nb", ["a\nb"], ["anb"]),
        (r"a\\nb", ["a\\nb"], ["a\nb"]),
        ("a.b", ["axb"], ["a\nb"]),
        ("a\x7fb", ["a\x7fb"], ["ab"]),
        (r"\d{2}", ["12"], ["1", "123"]),
    ],
)
def test_a_pattern_is_matched_from_end_to_end(pattern: str, yes: list[str], no: list[str]) -> None:
    assert all(fits(Regex(pattern), text) for text in yes)
    assert not any(fits(Regex(pattern), text) for text in no)


@pytest.mark.parametrize(
    ("whitespace", "text"),
    [
        ("fixed", '{"a": [1, 2], "b": "x"}'),
        ("compact", '{"a":[1,2],"b":"x"}'),
        ("flexible", '{ "a"\n:\t[1 ,2],\r\n "b":"x" }'),
    ],
)
def test_white_space_is_exactly_what_it_is_called(whitespace: Whitespace, text: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    made = {kind: Json.of(schema, kind) for kind in ("fixed", "compact", "flexible")}
    assert fits(made[whitespace], text)
    assert [kind for kind in ("fixed", "compact") if fits(made[kind], text)] == [
        kind for kind in ("fixed", "compact") if kind == whitespace
    ]


@pytest.mark.parametrize("place", ["[{}1, 2]", "[1{}, 2]", "[1,{}2]", "[1, 2{}]"])
def test_whitespace_loops_are_bounded(place: str) -> None:
    numbers = Json.of({"type": "array", "items": {"type": "integer"}}, "flexible")
    for space in (" ", "\n", "\t"):
        assert fits(numbers, place.replace("{}", space * 7))
        assert not fits(numbers, place.replace("{}", space * 9))


def test_whitespace_of_another_name_is_refused() -> None:
    with pytest.raises(ConstraintError, match="fixed, compact, flexible"):
        Json.of({}, "loose")  # type: ignore[arg-type]


def test_white_space_holds_inside_any_json_too() -> None:
    assert fits(Json.of({}), '{"a": [1, {}]}')
    assert not fits(Json.of({}), '{"a":[1, {}]}')
    assert fits(Json.of({}, "compact"), '{"a":[1,{}]}')


def test_what_a_schema_says_of_its_own_options_does_not_count() -> None:
    sly = Json.of({"type": "array", "items": {"type": "null"}, "x-guidance": {"whitespace_flexible": True}})
    assert fits(sly, "[null, null]")
    assert not fits(sly, "[null,    null]")


@pytest.mark.parametrize("of", [{"type": "text"}, {"type": "text", "other": 1}])
def test_plain_text_needs_no_constraint(of: dict[str, Any]) -> None:
    assert response_format(of) is None


def test_response_formats_are_openais() -> None:
    assert response_format({"type": "json_object"}) == Json('{"type": "object"}')
    schema = {"type": "integer"}
    made = response_format({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, "compact")
    assert made == RequestPart("response_format.json_schema.schema", Json.of(schema, "compact"))


@pytest.mark.parametrize(
    "given",
    [{}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "n"}}],
)
def test_what_is_no_response_format_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match="response_format"):
        response_format(given)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Choice(()), "not a choice"),
        (lambda: Choice(("",)), "not a choice"),
        (lambda: Choice("yes"), "not a choice"),  # type: ignore[arg-type]
        (lambda: Choice((1,)), "not a choice"),  # type: ignore[arg-type]
        (lambda: check(Regex("")), "the pattern is empty"),
        (lambda: check(Regex("a" * (MAX_BYTES + 1))), "at most 1,048,576"),
        (lambda: check(Lark("start: " + " " * MAX_BYTES)), "at most 1,048,576"),
        (lambda: check(Json.of({"const": "a" * MAX_BYTES})), "at most 1,048,576"),
        (lambda: Json.of("nonsense"), "the schema is not JSON"),
        (lambda: Json.of({"a": {1}}), "not JSON data"),
        (lambda: check(Json("[1]")), "an object or true or false"),
        (lambda: check(Json("[" * 3000)), "nested too deeply"),
        (lambda: check(Choice(("\ud800",))), "cannot be enforced"),
        (lambda: check(Regex("\ud800")), "cannot be enforced"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        make()


def test_a_grammar_inside_another_keeps_its_own_rules() -> None:
    inner = Lark('start: word ("," word)*\nword: /[a-z]+/')
    then = after("::", inner).then
    assert then is not None
    assert fits(then, "::ab,c")
    assert fits(then, "::  \nab")
    assert not fits(then, "::     ab")
    assert not fits(then, "::ab,")


SCHEMAS: dict[str, dict[str, Any]] = {
    "bounds": {"type": "integer", "minimum": -3, "maximum": 12},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[ab]+c?$"},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1, "a"]}], "items": False},
    "choice": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "nested": {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/x"},
            "b": {"type": "object", "properties": {"c": {"const": 1}}},
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"x": {"enum": ["p", "q", None]}},
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("whitespace", ["fixed", "compact", "flexible"])
def test_every_legal_text_is_valid(name: str, whitespace: Whitespace) -> None:
    texts = list(legal_texts(Json.of(SCHEMAS[name], whitespace), 20))
    assert len(texts) >= 5
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
