"""Request bodies: strict JSON within limits. Duplicate keys, NaN and half characters are errors."""

import json
import re
from math import isfinite
from typing import Any, Final, NoReturn

from starlette.requests import Request

from paceline.web.api_errors import ApiError

MAX_DIGITS: Final = 300  # of a whole number: a longer one may not fit a float
# A string that does not end takes the rest of the body with it, so that every byte is looked at once.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.S)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_MAYBE_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")  # an escape for half a character
_HALF: Final = re.compile("[\ud800-\udfff]")


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object of a request's body; bytes beyond the limit are not read."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"the body is too large: at most {max_bytes:,} bytes are read")
    data = parse_json(bytes(body), max_bytes)
    if not isinstance(data, dict):
        raise _bad("the body is not a JSON object")
    return data


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
    """How deep brackets nest; counted before the recursive parser sees them."""
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
