"""Bodies: JSON with one meaning passes unchanged, everything else is one line."""

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from paceline.web import request_body
from paceline.web.api_errors import ApiError, with_error_responses
from paceline.web.request_body import (
    FailFastModel,
    LimitedBodies,
    Shape,
    at_most,
    measure,
    parse_json,
    parse_request,
)

MB = 1_000_000

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values, st.booleans())
def test_json_passes_unchanged(data: Any, escaped: bool) -> None:
    assert parse_json(json.dumps(data, ensure_ascii=escaped).encode(), MB) == data


@given(st.binary(max_size=60) | st.text('[]{}":,\\u0dd8eE-+.1naNfI ', max_size=40).map(str.encode))
def test_any_bytes_are_data_or_one_line(body: bytes) -> None:
    said = ""
    try:
        data = parse_json(body, 50, 5)
    except ApiError as error:
        said = str(error)
    if said:
        assert said.startswith("the body ")
        assert "\n" not in said
    else:
        assert data == json.loads(body)
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON: Expecting value at line 1, column 1"),
        (b'{"a": 1,}', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1} {"b": 2}', "not JSON: Extra data"),
        (b"NaN", "has NaN, which is not JSON: expected a finite number"),
        (b'{"a": -Infinity}', "has -Infinity"),
        (b"[Infinity]", "has Infinity"),
        (b"1e999", "too large"),
        (b"1" * 301, "too long: expected at most 300 digits"),
        (b'{"a": 1, "b": 2, "a": 1}', "has the key 'a' twice"),
        (b'[{"x": {"a": 1, "\\u0061": 1}}]', "has the key 'a' twice"),
        (b'"\xff"', "not UTF-8 text: see byte 1"),
        (b'"\xed\xa0\x80"', "not UTF-8 text"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ("{}".encode("utf-16"), "not UTF-8 text"),
        (b'["\\ud800"]', "half a surrogate pair: expected whole characters"),
        (b'{"\\uDE00": 1}', "half a surrogate pair"),
        (b'"a\nb"', "not JSON"),
    ],
)
def test_mistakes_are_reported(body: bytes, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_json(body, MB)
    assert said in str(refused.value)


def test_size_is_limited() -> None:
    assert parse_json(b'"12345678"', 10) == "12345678"
    with pytest.raises(ApiError, match=r"^the body has 11 bytes: expected at most 10$"):
        parse_json(b'"123456789"', 10)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"b":', b"}]")])
def test_depth_is_limited(opening: bytes, closing: bytes) -> None:
    levels = 64 // (opening.count(b"[") + opening.count(b"{"))
    parse_json(opening * levels + b"1" + closing * levels, MB)
    with pytest.raises(ApiError, match="nested too deep: expected at most 64 levels"):
        parse_json(opening * (levels + 1) + b"1" + closing * (levels + 1), MB)


def test_brackets_in_texts_are_not_depth() -> None:
    for text in ("[" * 100, '\\"' + "[" * 100, '"[{' * 70, "\\"):
        assert parse_json(json.dumps({text: [text]}).encode(), MB) == {text: [text]}
    with pytest.raises(ApiError, match="nested too deep"):
        parse_json(b'["\\\\",' * 65 + b"1" + b"]" * 65, MB)


def test_no_depth_is_a_recursion_error() -> None:
    for body in (b"[" * 500_000, b'{"a":' * 200_000):
        with pytest.raises(ApiError, match="nested too deep"):
            parse_json(body, MB)
    for body in (b"[" * 40_000, b'{"a":' * 40_000):
        with pytest.raises(ApiError, match="nested too deep"):
            parse_json(body, MB, max_depth=10**6)


@pytest.mark.parametrize(
    "body",
    [b'"' + b'\\"' * 499_999, b'"' * MB, b"[" + b'"a' * 499_999, b"[]" * 500_000, b'"' + b"\\" * 999_998],
)
def test_no_body_takes_long(body: bytes) -> None:
    start = time.thread_time()
    with pytest.raises(ApiError):
        parse_json(body, MB)
    assert time.thread_time() - start < 2  # about 0.1 s; or seconds to hours, looked at again and again


def test_a_long_key_is_cut() -> None:
    twice = b'"' + b"k" * 1000 + b'": 1'
    with pytest.raises(ApiError) as refused:
        parse_json(b"{" + twice + b"," + twice + b"}", MB)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", Shape(0, 0, 1)),
        (b"7", Shape(0, 0, 1)),
        (b"[]", Shape(1, 1, 2)),
        (b'{"a": [1, 2, {"b": []}]}', Shape(4, 4, 7)),
        (rb'["[,\"[,\\", "\\\"[", "\\\\"]', Shape(1, 1, 4)),
        (b'["[,[,', Shape(1, 1, 2)),
    ],
)
def test_the_shape_of_a_body_is_known_before_it_is_parsed(body: bytes, expected: Shape) -> None:
    assert measure(body) == expected


@given(values)
def test_no_value_escapes_the_measure(data: Any) -> None:
    def count(value: Any) -> tuple[int, int, int]:
        inner = (
            [count(v) for v in (value.values() if isinstance(value, dict) else value)] if nests(value) else []
        )
        depths = [depth for depth, _, _ in inner]
        deepest = 1 + max(depths, default=0) if nests(value) else 0
        return deepest, nests(value) + sum(c for _, c, _ in inner), 1 + sum(v for _, _, v in inner)

    def nests(value: Any) -> bool:
        return isinstance(value, dict | list)

    depth, containers, all_values = count(data)
    shape = measure(json.dumps(data).encode())
    assert all(most >= exact for most, exact in zip(at_most(json.dumps(data).encode()), shape, strict=True))
    assert (shape.depth, shape.containers) == (depth, containers)
    assert all_values <= shape.values <= all_values + containers


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("part", "said"),
    [
        (b"[]", "too many lists and objects: expected at most 50,000"),
        (b"{}", "too many lists and objects"),
        (b'{"a":1}', "too many lists and objects"),
        (b"1", "too many values: expected at most 500,000"),
        (b'""', "too many values"),
    ],
)
def test_a_body_of_eight_megabytes_is_refused_by_its_shape(
    part: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parser sees it: it would hold the interpreter's lock for seconds."""
    monkeypatch.setattr(request_body, "_loaded", lambda text: pytest.fail("it was parsed"))
    body = b"[" + b",".join([part] * (8 * MB // (len(part) + 1))) + b"]"
    with pytest.raises(ApiError, match=said):
        parse_json(body, 9 * MB)


def test_an_object_has_a_limit_of_keys() -> None:
    keys = {str(i): i for i in range(4097)}
    with pytest.raises(ApiError, match="too many keys: expected at most 4,096"):
        parse_json(json.dumps(keys).encode(), MB)
    del keys["0"]
    assert parse_json(json.dumps(keys).encode(), MB) == keys


class _Part(FailFastModel):
    type: str = ""
    values: list[int] = Field(default_factory=list)


class _Body(FailFastModel):
    messages: list[dict[str, Any]] = Field(default_factory=list)
    parts: dict[str, _Part] = Field(default_factory=dict)
    prompt: str | list[str] | list[int] = ""


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"messages": [1] * 400_000}, "messages[0]"),
        ({"parts": {"a": {"values": ["x"] * 400_000}}}, "parts.a.values[0]"),
        ({"prompt": [None] * 400_000}, "prompt"),
    ],
)
def test_a_list_ends_at_its_first_error(data: dict[str, Any], param: str) -> None:
    """One error of pydantic's for each element would take seconds."""
    with pytest.raises(ValidationError) as caught:
        _Body.model_validate(data)
    assert caught.value.error_count() <= 3  # one for each member of a union
    with pytest.raises(ApiError) as refused:
        parse_request(data, _Body)
    assert refused.value.param == param


def request_of(body: bytes) -> tuple[dict[str, Any], Callable[[], Awaitable[Message]]]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "headers": headers}, receive


@pytest.mark.parametrize(("size", "calls"), [(10, 0), (request_body.INLINE_BYTES + 1, 1)])
@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_request_with_a_large_body_is_reported(size: int, calls: int, fails: bool) -> None:
    ended: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert not ended
        if fails:
            raise ApiError(400, "no")

    async def send(message: Message) -> None:
        raise AssertionError

    async def run() -> None:
        bodies = LimitedBodies(app, 60, MB, lambda: ended.append(True))
        with suppress(ApiError):
            await bodies(*request_of(b"x" * size), send)

    asyncio.run(run())
    assert len(ended) == calls


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_refused_body_is_freed_without_the_garbage_collector(size: int) -> None:
    """A request refers to its error, and the frames of the error's traceback to the body."""
    frames: list[weakref.ref[Any]] = []

    class Held:
        """Stands for a body: bytes have no weak references."""

    async def handler(http: Request) -> Response:
        held = Held()
        frames.append(weakref.ref(held))
        try:
            await request_of_model(http)
        except ApiError as error:
            http.state.error = error
            raise
        raise AssertionError(held)

    async def request_of_model(http: Request) -> None:
        held = Held()
        frames.append(weakref.ref(held))
        await request_body.read_request(http, _Body, MB)
        raise AssertionError(held)

    async def run() -> None:
        scope, receive = request_of(b"[" + b"1," * (size // 2) + b"1]")
        http = Request({**scope, "route": Route("/", lambda _: None)}, receive)
        assert (await with_error_responses(handler)(http)).status_code == 400
        assert isinstance(http.state.error, ApiError)  # the access log reads it
        assert [held() for held in frames] == [None, None]

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_large_body_is_parsed_beside_the_loop() -> None:
    threads: list[str] = []

    class Noting(BaseModel):
        text: str

        @model_validator(mode="after")
        def note(self) -> "Noting":
            threads.append(threading.current_thread().name)
            return self

    async def read(size: int) -> None:
        http = Request(*request_of(json.dumps({"text": "x" * size}).encode()))
        data, request = await request_body.read_request(http, Noting, MB)
        assert data == {"text": request.text}

    asyncio.run(read(10))
    asyncio.run(read(200_000))
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("paceline-body")
