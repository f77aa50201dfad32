"""JSON Schemas as data: walking their subschemas, and changes that are safe."""

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Final

# Keywords that hold subschemas; everything else in a schema is data.
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
)
# Their subschemas apply beside others to the same object.
_JOINED: Final = ("allOf", "if", "then", "else", "not", "dependentSchemas")
_CHOICES: Final = ("anyOf", "oneOf")
# Beside these, an alternative or a reference describes only a part of its object.
_SHAPING: Final = (
    "properties",
    "required",
    "patternProperties",
    "additionalProperties",
    "allOf",
    "if",
    "not",
)
_COMPOSED: Final = (*_CHOICES, "allOf", "$ref", "$dynamicRef", "if", "not", "patternProperties")


def parts(schema: Any) -> Iterator[tuple[str, str | int | None, Any]]:
    """The subschemas: keyword, name or index under it, and the subschema."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from ((key, name, part) for name, part in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from ((key, i, part) for i, part in enumerate(value))
        elif key in _SINGLE:
            yield key, None, value


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with every subschema changed, innermost first."""
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
    """Adds additionalProperties: false wherever one schema alone describes an object.

    Most tools refuse arguments that they do not know, and a model should not spend time on them. Every text
    that the result allows, the given schema allows too.
    """
    shared: set[str] = set()
    while not shared >= (more := set(_shared(schema, shared, "#"))):
        shared |= more
    return _closed(schema, shared, "#")


def _closed(schema: Any, shared: Set[str], pointer: str, alone: bool = True) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    inner = dict(schema)
    for key, name, part in parts(schema):
        here = f"{pointer}/{key}" if name is None else f"{pointer}/{key}/{name}"
        done = _closed(part, shared, here, _alone(key, here, schema, shared, alone))
        if name is None:
            inner[key] = done
        else:
            inner[key] = _with(inner[key], name, done)
    listed = "properties" in schema and "additionalProperties" not in schema
    if alone and pointer not in shared and listed and not any(key in schema for key in _COMPOSED):
        inner["additionalProperties"] = False
    return inner


def _shared(schema: Any, shared: Set[str], pointer: str, alone: bool = True) -> Iterator[str]:
    """References to schemas that describe only a part of an object."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (alone and pointer not in shared and _unshaped(schema)):
        yield reference
    for key, name, part in parts(schema):
        here = f"{pointer}/{key}" if name is None else f"{pointer}/{key}/{name}"
        yield from _shared(part, shared, here, _alone(key, here, schema, shared, alone))


def _alone(key: str, pointer: str, schema: Mapping[str, Any], shared: Set[str], alone: bool) -> bool:
    """True if a subschema describes all of its object."""
    if key in _CHOICES:
        return alone and _unshaped(schema) and "$ref" not in schema
    return key not in _JOINED and pointer not in shared


def _unshaped(schema: Mapping[str, Any]) -> bool:
    return not any(key in schema for key in _SHAPING)


def _with(parts_: Any, name: str | int, part: Any) -> Any:
    if isinstance(parts_, Mapping):
        return {**parts_, name: part}
    return [part if i == name else old for i, old in enumerate(parts_)]
