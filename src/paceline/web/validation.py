"""How a problem with a file or a request is told: where it is, and what is known there."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from paceline.strings import short, unknown_name

Place = Sequence[int | str]


def place(parts: Place) -> str:
    """The parts as they would be written in code; empty for the whole."""
    written = [f"[{part}]" if isinstance(part, int) else _dotted(part) for part in parts if part != "[key]"]
    return "".join(written).removeprefix(".")


def _dotted(key: str) -> str:
    """A key as part of a place, whatever characters it has."""
    return f".{key}" if re.fullmatch(r"[\w-]{1,60}", key) else f".{short(key)}"


def unknown_key(model: type[BaseModel], at: Place) -> str:
    """What to say of a key that its object does not have; `at` ends with the key."""
    known = known_keys(model, at[:-1])
    return unknown_name("key", str(at[-1]), known)


def known_keys(model: type[BaseModel], at: Place) -> list[str]:
    """The keys of the part of `model` that a place leads to."""
    shapes = [model]
    for part in at:
        if isinstance(part, str):
            shapes = _inside(shapes, part)
    return list(dict.fromkeys(key for shape in shapes for key in _keys(shape)))


def _inside(shapes: list[type[BaseModel]], part: str) -> list[type[BaseModel]]:
    """Behind a field, or those of a union that `part` stands for: by its class, or by its `type`."""
    for shape in shapes:
        if part in (keys := _keys(shape)):
            return list(_models(shape.model_fields[keys[part]].annotation)) or shapes
    return [shape for shape in shapes if shape.__name__ == part or part in _tags(shape)] or shapes


def _keys(shape: type[BaseModel]) -> dict[str, str]:
    """Fields by the keys they are read from."""
    return {field.alias or name: name for name, field in shape.model_fields.items()}


def _tags(shape: type[BaseModel]) -> Iterable[Any]:
    field = shape.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from _models(inner)
