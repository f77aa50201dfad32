"""The hash of a conversation: shared by its turns, told apart from others, cheap for any body."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.web import conversation
from paceline.web.api_keys import Key
from paceline.web.conversation import HEADER, conversation_of

OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def of(messages: Any, key: Key | None = None, headers: dict[str, str] | None = None, **body: Any) -> str:
    return conversation_of(headers or {}, key, {"messages": messages, **body})


def test_all_turns_share_it() -> None:
    later = [*OPENING, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And?"}]
    assert of(later, temperature=1) == of(OPENING)


@pytest.mark.parametrize(
    "other",
    [
        of([{"role": "system", "content": "Be brief!"}, OPENING[1]]),
        of([OPENING[0], {"role": "user", "content": "Hello!"}]),
        of(OPENING, user="bo"),
        of(OPENING, Key(name="bo", hash="0" * 64)),
        of(OPENING, headers={HEADER: "1"}),
    ],
)
def test_others_have_another(other: str) -> None:
    assert other != of(OPENING)


def test_a_client_may_name_it() -> None:
    assert of(OPENING, headers={HEADER: "1"}) == of(["anything"], headers={HEADER: "1"})


def test_long_texts_are_told_apart_by_beginning_length_and_end() -> None:
    long = "x" * 20_000
    found = {
        of([{"role": "user", "content": text}]) for text in (long, f"y{long[1:]}", f"{long[1:]}y", long[1:])
    }
    assert len(found) == 4


@pytest.mark.parametrize("content", ["x" * 8_000_000, [{"type": "text", "text": "x"}] * 100_000])
def test_a_huge_body_is_not_hashed_whole(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waits for the hash."""
    hashed: list[int] = []

    def blake2b(data: bytes, **more: Any) -> Any:
        hashed.append(len(data))
        return hashlib.blake2b(data, **more)

    monkeypatch.setattr(conversation, "hashlib", SimpleNamespace(blake2b=blake2b))
    of([{"role": "user", "content": content}])
    assert hashed[0] < 10_000


@pytest.mark.parametrize("body", [{}, {"messages": "text"}, {"messages": [1, None]}, {"prompt": [[1, 2]]}])
def test_anything_has_one(body: dict[str, Any]) -> None:
    assert len(conversation_of({}, None, body)) == 32
