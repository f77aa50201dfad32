"""Request bodies: strict JSON within limits, then a pydantic model. Errors name the parameter.

Duplicate keys, NaN and half characters are errors.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from math import isfinite
from typing import Any, Final, NoReturn, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, ValidationError
from starlette.requests import Request

from paceline.errors import short, unknown_name
from paceline.web.api_errors import ApiError

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
Loc = Sequence[int | str]  # pydantic's name for a path

MAX_DIGITS: Final = 300  # of a whole number: a longer one may not fit a float
# A string that does not end takes the rest of the body with it, so that every byte is looked at once.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.S)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_MAYBE_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")  # an escape for half a character
_HALF: Final = re.compile("[\ud800-\udfff]")
_RENAMED: Final = {"learn": "remember"}  # in requests and routes, before 0.2
# Parts of a loc that name a member of a union, not a key.
_UNION_MEMBER: Final = re.compile(r"(str|int|float|bool|(list|dict|literal)\[.*|[A-Z]\w*)")


async def read_request(http: Request, model: type[M], max_bytes: int) -> tuple[dict[str, Any], M]:
    """The body as sent, and as the model; bytes beyond the limit are not read."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"the body is too large: at most {max_bytes:,} bytes are read")
    data = parse_json(bytes(body), max_bytes)
    if not isinstance(data, dict):
        raise _bad("the body is not a JSON object")
    return data, parse_request(data, model)


def _bad(message: str) -> ApiError:
    return ApiError(400, message)


def parse_json(body: bytes, max_bytes: int, max_depth: int = 64) -> Any:
    """The data of a body. An error repeats nothing of it but names of keys."""
    if len(body) > max_bytes:
        raise ApiError(413, f"the body has {len(body):,} bytes: expected at most {max_bytes:,}")
    text = _decoded(body)
    if _depth(body) > max_depth:
        raise _bad(f"the body is nested too deep: expected at most {max_depth} levels")
    data = _loaded(text)
    if _MAYBE_HALF.search(text) and _HALF.search(json.dumps(data, ensure_ascii=False)):
        raise _bad("the body has half a surrogate pair: expected whole characters")
    return data


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _bad(f"the body is not UTF-8 text: see byte {problem.start}") from None


def _depth(body: bytes) -> int:
    """The depth of brackets, counted before the recursive parser sees them."""
    depth = deepest = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def _loaded(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int
        )
    except json.JSONDecodeError as problem:
        position = f"line {problem.lineno}, column {problem.colno}"
        raise _bad(f"the body is not JSON: {problem.msg} at {position}") from None
    except RecursionError:  # only for a max_depth beyond what Python can follow
        raise _bad("the body is nested too deep: expected fewer levels") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _bad(f"the body has the key {twice[:40]!r} twice in one object: expected it once")
    return data


def _constant(name: str) -> NoReturn:
    raise _bad(f"the body has {name}, which is not JSON: expected a finite number")


def _float(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise _bad("the body has a number that is too large: expected one that fits 64 bits")
    return value


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _bad(f"the body has a number that is too long: expected at most {MAX_DIGITS} digits")
    return int(digits)


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
