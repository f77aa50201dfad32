"""JSON Schemas as data, changed where a change is safe."""

from collections.abc import Callable, Mapping
from typing import Any, Final

# Keywords beside which an object may have properties that it does not list itself.
_COMPOSED: Final = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "not", "patternProperties")
# Where the schemas within a schema stand: everything else in it is data.
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with each schema in it changed, the innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    inner = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            inner[key] = {name: mapped(part, change) for name, part in value.items()}
        elif key in _LISTED and isinstance(value, list):
            inner[key] = [mapped(part, change) for part in value]
        elif key in _SINGLE:
            inner[key] = mapped(value, change)
    return change(inner)


def closed(schema: Any) -> Any:
    """The schema without properties that it does not list, wherever it does not speak of them.

    Arguments that a tool does not know are refused by most tools, and a model should not spend time on them.
    What this allows, the schema as given allows too.
    """
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _closed_below(key, value) for key, value in schema.items()}
    listed = "properties" in schema and "additionalProperties" not in schema
    if listed and not any(key in schema for key in _COMPOSED):
        inner["additionalProperties"] = False
    return inner


def _closed_below(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
        return {name: closed(inner) for name, inner in value.items()}
    if key in ("items", "additionalProperties", "additionalItems", "contains"):
        return closed(value)
    if key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
        return [closed(inner) for inner in value]
    return value
