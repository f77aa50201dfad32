"""Request bodies: strict JSON within limits, then a pydantic model. Errors name the parameter.

Duplicate keys, NaN and half characters are errors.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache, partial
from inspect import signature
from itertools import takewhile
from math import isfinite
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, get_args

import numpy as np
from pydantic import AliasChoices, BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import Busy, short, unknown_name
from paceline.web.api_errors import ApiError, api_error

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Loc = Sequence[int | str]  # pydantic's name for a path

JSON: Final = "application/json"
BODY_TIMEOUT_S: Final = 60.0
INLINE_BYTES: Final = 65_536  # of a body that is parsed on the event loop
MAX_DIGITS: Final = 300  # of a whole number: a longer one may not fit a float
MAX_DEPTH: Final = 64  # of nested lists and objects
# A parser in C lets no other thread run: these bound it to some ten milliseconds. Numbers are parsed by
# functions of ours, between which other threads run.
MAX_VALUES: Final = 500_000
MAX_CONTAINERS: Final = 50_000  # lists and objects, which also cost the garbage collector time
MAX_NAME: Final = 80  # characters of the name of an ignored parameter that are shown
MAX_IGNORED: Final = 64  # unknown parameters of one request, where they are ignored
MAX_KEYS: Final = 4096  # of one object: pydantic has an error for every unknown one
_FAIL_FAST: Final = {
    kind
    for kind, make in (("list", core_schema.list_schema), ("dict", core_schema.dict_schema))
    if "fail_fast" in signature(make).parameters  # for dict: from pydantic 2.13 on
}
_MAYBE_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")  # an escape for half a character
_HALF: Final = re.compile("[\ud800-\udfff]")
_RENAMED: Final = {"learn": "remember"}  # in requests and routes, before 0.2
# Parts of a loc that name a member of a union, not a key.
_UNION_MEMBER: Final = re.compile(r"(str|int|float|bool|(list|dict|literal)\[.*|[A-Z]\w*)")


class LimitedBodies:
    """Middleware: a body arrives within a time, and bodies in memory have a limit together.

    after_large: called on the event loop when a request with a large body has ended.
    """

    def __init__(
        self, app: ASGIApp, timeout_s: float, max_bytes: int, after_large: Callable[[], None]
    ) -> None:
        self._app, self._after_large = app, after_large
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._held = 0  # bytes of the bodies of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        held, more = 0, True

        async def receive_limited() -> Message:
            nonlocal held, more
            if not more:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, "the body did not arrive in time", "timeout_error", code="timeout"
                ) from None
            more, size = message.get("more_body", False), len(message.get("body", b""))
            held, self._held = held + size, self._held + size
            if self._held > self._max_bytes and held > INLINE_BYTES:  # a small one is never in the way
                raise api_error(Busy("the server holds too many large requests: try again later"))
            return message

        try:
            await self._app(scope, receive_limited, send)
        finally:
            self._held -= held
            if held > INLINE_BYTES:
                self._after_large()


async def read_request(http: Request, model: type[M], max_bytes: int) -> tuple[dict[str, Any], M]:
    """The body as sent, and as the model; bytes beyond the limit are not read."""

    def parsed(body: bytes) -> tuple[dict[str, Any], M]:
        data = parse_object(body, max_bytes)
        return data, parse_request(data, model)

    body = await _read(http, max_bytes)
    return await off_loop(http, partial(parsed, body))


async def read_object(http: Request, max_bytes: int) -> tuple[bytes, dict[str, Any]]:
    """A body that is a JSON object: its bytes, and its data."""
    body = await _read(http, max_bytes)
    return body, await off_loop(http, partial(parse_object, body, max_bytes))


async def _read(http: Request, max_bytes: int) -> bytes:
    _check_media_type(http.headers.get("content-type", ""))
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"the body is too large: at most {max_bytes:,} bytes are read")
    http.state.large = len(body) > INLINE_BYTES
    return bytes(body)


async def off_loop(http: Request, call: Callable[[], T]) -> T:
    """The result of a call whose work grows with the body: beside the event loop, if the body is large."""
    if not http.state.large:
        return call()
    try:
        result = _parsers().submit(copy_context().run, call)
    except RuntimeError as problem:  # "can't start new thread"
        raise MemoryError from problem
    return await asyncio.wrap_future(result)


def _check_media_type(header: str) -> None:
    """Browsers send other types without asking the server first (a CORS preflight)."""
    if header.partition(";")[0].strip().lower() != JSON:
        raise ApiError(
            415,
            f"the header Content-Type is not usable: expected {JSON}",
            code="unsupported_media_type",
        )


def parse_object(body: bytes, max_bytes: int) -> dict[str, Any]:
    data = parse_json(body, max_bytes)
    if not isinstance(data, dict):
        raise _bad("the body is not a JSON object")
    return data


@cache
def _parsers() -> ThreadPoolExecutor:
    """One thread: large bodies wait for one another, and nothing else waits for them."""
    return ThreadPoolExecutor(1, "paceline-body")


def _bad(message: str) -> ApiError:
    return ApiError(400, message)


def parse_json(body: bytes, max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """The data of a body. An error repeats nothing of it but names of keys."""
    if len(body) > max_bytes:
        raise ApiError(413, f"the body has {len(body):,} bytes: expected at most {max_bytes:,}")
    text = _decoded(body)
    shape = at_most(body)
    if shape.depth > min(max_depth, MAX_CONTAINERS) or shape.values > MAX_VALUES:
        shape = measure(body)
    if shape.depth > max_depth:
        raise _bad(f"the body is nested too deep: expected at most {max_depth} levels")
    if shape.containers > MAX_CONTAINERS:
        raise _bad(f"the body has too many lists and objects: expected at most {MAX_CONTAINERS:,}")
    if shape.values > MAX_VALUES:
        raise _bad(f"the body has too many values: expected at most {MAX_VALUES:,}")
    data = _loaded(text)
    if _MAYBE_HALF.search(text) and _HALF.search(json.dumps(data, ensure_ascii=False)):
        raise _bad("the body has half a surrogate pair: expected whole characters")
    return data


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _bad(f"the body is not UTF-8 text: see byte {problem.start}") from None


class Shape(NamedTuple):
    depth: int
    containers: int  # lists and objects
    values: int


def at_most(body: bytes) -> Shape:
    """An upper bound, for the price of a scan: brackets and commas within strings count too."""
    containers = body.count(b"[") + body.count(b"{")
    return Shape(containers, containers, 1 + containers + body.count(b","))


def measure(body: bytes) -> Shape:
    """The shape of a JSON text, before a parser sees it; up to its first mistake, if it has one.

    As simdjson finds strings (arXiv 1902.08318): a byte is inside one if the quotes before it, without those
    that are escaped, are odd in number. NumPy works without the interpreter's lock.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    text = np.frombuffer(body, np.uint8)
    text = text[~np.logical_xor.accumulate(text == ord('"'))] if len(text) else text
    opening, closing = (np.isin(text, list(brackets)) for brackets in (b"[{", b"]}"))
    steps = opening.astype(np.int32) - closing
    depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
    containers = int(np.count_nonzero(opening))
    return Shape(depth, containers, 1 + containers + int(np.count_nonzero(text == ord(","))))


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
    if len(pairs) > MAX_KEYS:
        raise _bad(f"the body has an object with too many keys: expected at most {MAX_KEYS:,}")
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
    """A request's body, or the part of it at `within`; ApiError names the first bad parameter.

    Within `lenient`, unknown parameters are ignored.
    """
    try:
        value = model.model_validate(data)
    except ValidationError as error:
        ignored = _ignored.get()
        if ignored is None:
            raise _api_error(error, model, within) from None
        value = _without_unknown(data, model, within, error, ignored)
    log_renamed(data)
    return value


_ignored: ContextVar[list[str] | None] = ContextVar("ignored", default=None)  # None: none is


@contextmanager
def lenient() -> Iterator[list[str]]:
    """Bodies that are parsed inside may have unknown parameters; those ignored are in the list."""
    names: list[str] = []
    token = _ignored.set(names)
    try:
        yield names
    finally:
        _ignored.reset(token)


def shown_name(name: str) -> str:
    """The name of an ignored parameter, as a header and a metric's label may have it."""
    return name[:MAX_NAME].encode("ascii", "backslashreplace").decode("ascii").replace(",", " ")


def _without_unknown(
    data: Mapping[str, Any], model: type[M], within: str, error: ValidationError, ignored: list[str]
) -> M:
    """Parses again, without the keys that nobody knows; any other error stays."""
    while True:
        found = error.errors(include_url=False, include_input=False)
        extra = [each["loc"] for each in found if each["type"] == "extra_forbidden"]
        unknown = [loc for loc in extra if _is_alias(model, loc) is None]
        if not unknown or len(ignored) + len(unknown) > MAX_IGNORED:
            raise _api_error(error, model, within) from None
        for loc in unknown:
            data = _without(data, loc)
            ignored.append(".".join(filter(None, (within, json_path(loc)))))
        try:
            return model.model_validate(data)
        except ValidationError as again:
            error = again


def _without(data: Any, loc: Loc) -> Any:
    """A copy without the key at the end of a path, some parts of which name members of unions."""
    part, *rest = loc
    if isinstance(data, Mapping) and part in data:
        kept = {key: value for key, value in data.items() if rest or key != part}
        return kept | {part: _without(data[part], rest)} if rest else kept
    if isinstance(data, list) and isinstance(part, int):
        return [_without(value, rest) if i == part else value for i, value in enumerate(data)]
    return _without(data, rest) if rest else data


def _fail_fast(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(_fail_fast(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")  # or a field of that name
    ends = {"fail_fast": True} if isinstance(kind, str) and kind in _FAIL_FAST else {}
    return {key: part if key == "metadata" else _fail_fast(part) for key, part in schema.items()} | ends


class FailFastModel(BaseModel):
    """A model whose lists and mappings end at their first error: pydantic would make one for each element."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema: CoreSchema = _fail_fast(handler(source))
        return schema


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
    if name := _is_alias(model, at):
        return f"another name of {name!r}: give one of them"
    return unknown_name("key", str(at[-1]), known_keys(model, at[:-1]))


def _is_alias(model: type[BaseModel], at: Loc) -> str | None:
    """The field that has the key as another name, if one does: the two were given together."""
    key = str(at[-1])
    for shape in _shapes(model, at[:-1]):
        for name, field in shape.model_fields.items():
            if isinstance(field.validation_alias, AliasChoices) and key in field.validation_alias.choices:
                return name
    return None


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
