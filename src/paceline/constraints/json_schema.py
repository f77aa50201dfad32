"""JSON Schemas as data: walking their subschemas, and changes that are safe."""

from collections.abc import Callable, Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass, field
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
    that the result allows, the given schema allows too. The work is linear in the schema's size.
    """
    nodes: dict[str, _Node] = {}
    _collect(schema, nodes, "#", True, False)
    shared = _shared(nodes)
    return _closed(schema, shared, "#")


@dataclass(slots=True)
class _Node:
    """A subschema, by its pointer."""

    schema: Mapping[str, Any]
    alone: bool  # it describes all of its object, unless a reference shares it
    choice: bool  # one of several alternatives: it is alone if they are
    choices: list[str] = field(default_factory=list)  # its own alternatives


def _closed(schema: Any, shared: Set[str], pointer: str, alone: bool = True) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    inner = dict(schema)
    for key, name, part in parts(schema):
        here = _pointer(pointer, key, name)
        done = _closed(part, shared, here, _alone(key, here, schema, shared, alone))
        if name is None:
            inner[key] = done
        else:
            if inner[key] is schema[key]:
                inner[key] = copy(schema[key])
            inner[key][name] = done
    listed = "properties" in schema and "additionalProperties" not in schema
    if alone and pointer not in shared and listed and not any(key in schema for key in _COMPOSED):
        inner["additionalProperties"] = False
    return inner


def _collect(schema: Any, nodes: dict[str, _Node], pointer: str, alone: bool, choice: bool) -> None:
    """All subschemas, as if no reference shared any of them."""
    if not isinstance(schema, Mapping):
        return
    nodes[pointer] = node = _Node(schema, alone, choice)
    for key, name, part in parts(schema):
        here = _pointer(pointer, key, name)
        if key in _CHOICES:
            node.choices.append(here)
        _collect(part, nodes, here, _alone(key, here, schema, frozenset(), alone), key in _CHOICES)


def _shared(nodes: Mapping[str, _Node]) -> set[str]:
    """References to schemas that describe only a part of an object.

    A schema that is shared describes only a part too, and so do its alternatives and all they refer to.
    """
    shared: set[str] = set()
    left = [node for node in nodes.values() if not (node.alone and _unshaped(node.schema))]
    while left:
        node = left.pop()
        reference = node.schema.get("$ref")
        if not isinstance(reference, str) or reference in shared:
            continue
        shared.add(reference)
        if (target := nodes.get(reference)) is not None:
            left.append(target)
            if not target.choice and reference != "#":
                left += _alternatives(target, nodes)
    return shared


def _alternatives(node: _Node, nodes: Mapping[str, _Node]) -> Iterator[_Node]:
    """Those that were alone because this schema was."""
    if not (node.alone and _unshaped(node.schema) and "$ref" not in node.schema):
        return
    node.alone = False
    for pointer in node.choices:
        if (choice := nodes.get(pointer)) is not None:
            yield from _alternatives(choice, nodes)
            yield choice


def _pointer(pointer: str, key: str, name: str | int | None) -> str:
    return f"{pointer}/{key}" if name is None else f"{pointer}/{key}/{name}"


def _alone(key: str, pointer: str, schema: Mapping[str, Any], shared: Set[str], alone: bool) -> bool:
    """True if a subschema describes all of its object."""
    if key in _CHOICES:
        return alone and _unshaped(schema) and "$ref" not in schema
    return key not in _JOINED and pointer not in shared


def _unshaped(schema: Mapping[str, Any]) -> bool:
    return not any(key in schema for key in _SHAPING)
