"""Why a schema cannot be enforced: one line that names the keyword and where it stands."""

from typing import Any

import pytest

from paceline.constraints import Json, check
from paceline.constraints.explain import explain
from paceline.errors import ConstraintError


def inside(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"deep": {"type": "array", "items": schema}}}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"if": {"type": "null"}, "then": {}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "string", "format": "flavour"}, "format"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "strin"}, "type"),
        ({"$ref": "https://example.org/x.json"}, "$ref"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
    ],
)
def test_the_keyword_and_its_pointer_are_named(schema: dict[str, Any], keyword: str) -> None:
    for given, place in ((schema, f"#/{keyword}"), (inside(schema), f"/{keyword}")):
        with pytest.raises(ConstraintError) as caught:
            check(Json.of(given))
        line = str(caught.value)
        assert line.startswith("cannot be enforced: ")
        assert "\n" not in line
        assert keyword in line
        assert place in line


def test_two_keywords_are_both_named() -> None:
    with pytest.raises(ConstraintError, match=r"uniqueItems at #/uniqueItems") as caught:
        check(Json.of({"type": "array", "uniqueItems": True, "contains": {}}))
    assert "contains at #/contains" in str(caught.value)
    assert " are not supported" in str(caught.value)


@pytest.mark.parametrize("message", ["", "\n", "12(3): something", "at 1(2): Unimplemented keys: [oops"])
def test_any_message_becomes_one_line(message: str) -> None:
    schemas: list[Any] = [None, {}, {"not": {}}]
    for schema in schemas:
        line = explain(message, schema)
        assert line
        assert "\n" not in line
