"""Checks a call that was read from free text against the tools of its request."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from paceline.errors import ConstraintError
from paceline.text import OfferedTools

MAX_STEPS: Final = 10_000  # through the schema, for one call


class ToolSchemas(OfferedTools):
    """fits_text: checks the JSON of a call, {"name": ..., "arguments": {...}}, by the grammar for it.

    Its work is bounded; a validator that uses `re` for a schema's patterns could be stopped by a hostile one.
    enforced: the text is written under a `TriggerCursor` with the openings of the same calls.
    """

    def __init__(
        self, schemas: Mapping[str, str], fits_text: Callable[[str], bool], enforced: bool = False
    ) -> None:
        self._schemas = schemas  # as JSON, closed, by tool
        self._fits_text = fits_text
        self._enforced = enforced

    @property
    def names(self) -> Collection[str]:
        return self._schemas.keys()

    @property
    def enforced(self) -> bool:
        return self._enforced

    def fits(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """In any order of members, though a grammar knows but one."""
        schema = json.loads(self._schemas[name])
        try:
            call = {"name": name, "arguments": _Ordering(schema).value(arguments, schema)}
            return self._fits_text(json.dumps(call, ensure_ascii=False))
        except (ConstraintError, RecursionError):
            return False

    def typed(self, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
        properties = _mapping(json.loads(self._schemas[name]), "properties")
        return {key: _typed(text, properties.get(key)) for key, text in texts.items()}


def _typed(text: str, schema: Any) -> Any:
    """A text stays a text where the schema wants one; anything else is read as JSON, if it is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


class _Ordering:
    """Puts the members of a value's objects in the order of a schema; those unknown to it come last."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def value(self, value: Any, schema: Any) -> Any:
        if isinstance(value, Mapping):
            known: dict[str, Any] = {}
            for part in self._applied(schema, value):
                known |= _mapping(part, "properties")
            keys = [key for key in known if key in value] + [key for key in value if key not in known]
            other = _mapping(schema, "additionalProperties")
            return {key: self.value(value[key], known.get(key, other)) for key in keys}
        if isinstance(value, list):
            parts = list(self._applied(schema, value))
            return [self.value(one, _item(parts, i)) for i, one in enumerate(value)]
        return value

    def _applied(self, schema: Any, value: Any) -> Iterator[Mapping[str, Any]]:
        """The schema and those it refers to; of alternatives, the first that knows the value's members."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ConstraintError("the schema takes too long to follow")
        if not isinstance(schema, Mapping):
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield from self._applied(self._referred(reference), value)
        for part in _list(schema, "allOf"):
            yield from self._applied(part, value)
        for key in ("anyOf", "oneOf"):
            options = [list(self._applied(option, value)) for option in _list(schema, key)]
            fitting = [parts for parts in options if _knows(parts, value)]
            yield from (fitting or options or [[]])[0]

    def _referred(self, reference: str) -> Any:
        """The part of the schema that a reference within it means."""
        part = self._root if reference.startswith("#") else None
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, Mapping) else None
        return part


def _item(parts: Sequence[Mapping[str, Any]], index: int) -> Any:
    for part in parts:
        first = _list(part, "prefixItems")
        if index < len(first):
            return first[index]
    return next((part["items"] for part in parts if "items" in part), None)


def _knows(parts: Sequence[Mapping[str, Any]], value: Any) -> bool:
    if not isinstance(value, Mapping):
        return any("items" in part or "prefixItems" in part for part in parts)
    known = {key for part in parts for key in _mapping(part, "properties")}
    required = {key for part in parts for key in _list(part, "required") if isinstance(key, str)}
    return required <= value.keys() <= known


def _mapping(schema: Any, key: str) -> Mapping[str, Any]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
