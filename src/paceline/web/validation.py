"""From pydantic's errors to messages with a path into the data and the nearest known key."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, Final, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, ValidationError

from paceline.strings import short, unknown_name
from paceline.web.api_errors import ApiError

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
Loc = Sequence[int | str]  # pydantic's name for a path

_RENAMED: Final = {"learn": "remember"}  # in requests and routes, before 0.2
# Parts of a loc that name a member of a union, not a key.
_UNION_MEMBER: Final = re.compile(r"(str|int|float|bool|(list|dict|literal)\[.*|[A-Z]\w*)")


def parse_request(data: Mapping[str, Any], model: type[M], within: str = "") -> M:
    """A request's body, or the part of it at `within`; ApiError names the first bad parameter."""
    try:
        value = model.model_validate(data)
    except ValidationError as error:
        raise _api_error(error, model, within) from None
    log_renamed(data)
    return value


def log_renamed(data: Mapping[str, Any]) -> None:
    """Logs, once for each, the keys of an object whose names have changed."""
    for old in _RENAMED.keys() & data.keys():
        _log_once(old)


@cache
def _log_once(old: str) -> None:
    log.warning("the field %s is now called %s; the old name will be removed", old, _RENAMED[old])


def _api_error(error: ValidationError, model: type[BaseModel], within: str) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    begin, *inner = first["loc"]
    param = json_path([begin, *takewhile(lambda part: not _UNION_MEMBER.fullmatch(str(part)), inner)])
    param = ".".join(filter(None, (within, param)))
    unknown = first["type"] == "extra_forbidden"
    reason = unknown_key(model, first["loc"]) if unknown else first["msg"]
    return ApiError(400, f"{param}: {reason}", param=param)


def json_path(parts: Loc) -> str:
    """The parts as they would be written in code; empty for the whole."""
    written = [f"[{part}]" if isinstance(part, int) else _dotted(part) for part in parts if part != "[key]"]
    return "".join(written).removeprefix(".")


def _dotted(key: str) -> str:
    """A key as part of a path, whatever characters it has."""
    return f".{key}" if re.fullmatch(r"[\w-]{1,60}", key) else f".{short(key)}"


def unknown_key(model: type[BaseModel], at: Loc) -> str:
    """The message for a key that its object does not have; `at` ends with the key."""
    key = str(at[-1])
    for shape in _shapes(model, at[:-1]):
        for name, field in shape.model_fields.items():
            if isinstance(field.validation_alias, AliasChoices) and key in field.validation_alias.choices:
                return f"another name of {name!r}: give one of them"
    return unknown_name("key", key, known_keys(model, at[:-1]))


def known_keys(model: type[BaseModel], at: Loc) -> list[str]:
    """The keys of the part of `model` at a path."""
    return list(dict.fromkeys(key for shape in _shapes(model, at) for key in _keys(shape)))


def _shapes(model: type[BaseModel], at: Loc) -> list[type[BaseModel]]:
    shapes = [model]
    for part in at:
        if isinstance(part, str):
            shapes = _inside(shapes, part)
    return shapes


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
