"""Bodies: JSON with one meaning passes unchanged, everything else is one line."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.web.api_errors import ApiError
from paceline.web.request_body import parse_json

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
        with pytest.raises(ApiError, match="nested too deep"):
            parse_json(body, MB, max_depth=10**6)


@pytest.mark.parametrize(
    "body",
    [b'"' + b'\\"' * 499_999, b'"' * MB, b"[" + b'"a' * 499_999, b"[]" * 500_000, b'"' + b"\\" * 999_998],
)
def test_no_body_takes_long(body: bytes) -> None:
    start = time.process_time()
    with pytest.raises(ApiError):
        parse_json(body, MB)
    assert (
        time.process_time() - start < 2
    )  # about 0.1 s; seconds to hours if it were looked at again and again


def test_a_long_key_is_cut() -> None:
    twice = b'"' + b"k" * 1000 + b'": 1'
    with pytest.raises(ApiError) as refused:
        parse_json(b"{" + twice + b"," + twice + b"}", MB)
    assert len(str(refused.value)) < 150
