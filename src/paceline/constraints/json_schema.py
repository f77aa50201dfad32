"""JSON Schemas as data: what stands where in them, and changes that are safe."""

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Final

# Where the schemas within a schema stand: everything else in it is data.
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
_JOINED: Final = (
    "allOf",
    "if",
    "then",
    "else",
    "not",
    "dependentSchemas",
)  # what is in them is one of several
_CHOICES: Final = ("anyOf", "oneOf")
# Beside these, an alternative or a reference says only a part of what its object may be.
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
    """The schemas within a schema: under which keyword, under which name or number in it, and the schema."""
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
    """The schema without properties that it does not list, wherever it alone says what an object may be.

    Arguments that a tool does not know are refused by most tools, and a model should not spend time on them.
    What this allows, the schema as given allows too.
    """
    shared: set[str] = set()
    while not shared >= (more := set(_shared(schema, shared, "#"))):
        shared |= more
    return _closed(schema, shared, "#")


def _closed(schema: Any, shared: Set[str], place: str, alone: bool = True) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    inner = dict(schema)
    for key, name, part in parts(schema):
        here = f"{place}/{key}" if name is None else f"{place}/{key}/{name}"
        done = _closed(part, shared, here, _alone(key, here, schema, shared, alone))
        if name is None:
            inner[key] = done
        else:
            inner[key] = _with(inner[key], name, done)
    listed = "properties" in schema and "additionalProperties" not in schema
    if alone and place not in shared and listed and not any(key in schema for key in _COMPOSED):
        inner["additionalProperties"] = False
    return inner


def _shared(schema: Any, shared: Set[str], place: str, alone: bool = True) -> Iterator[str]:
    """The references to schemas that say only a part of what an object may be."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (alone and place not in shared and _unshaped(schema)):
        yield reference
    for key, name, part in parts(schema):
        here = f"{place}/{key}" if name is None else f"{place}/{key}/{name}"
        yield from _shared(part, shared, here, _alone(key, here, schema, shared, alone))


def _alone(key: str, place: str, schema: Mapping[str, Any], shared: Set[str], alone: bool) -> bool:
    """Whether a schema within this one says all that its object may be."""
    if key in _CHOICES:
        return alone and _unshaped(schema) and "$ref" not in schema
    return key not in _JOINED and place not in shared


def _unshaped(schema: Mapping[str, Any]) -> bool:
    return not any(key in schema for key in _SHAPING)


def _with(parts_: Any, name: str | int, part: Any) -> Any:
    if isinstance(parts_, Mapping):
        return {**parts_, name: part}
    return [part if i == name else old for i, old in enumerate(parts_)]
