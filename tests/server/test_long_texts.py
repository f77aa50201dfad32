"""Long texts keep nobody else waiting."""

import threading
from typing import Any

import httpx
import openai
import pytest

from paceline.text import Tokenizer
from support.servers import Running

pytestmark = pytest.mark.model


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=60)


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("encode", "/tokenize", {"prompt": "one two"}),
        ("encode_chat", "/tokenize", {"messages": [{"role": "user", "content": "one"}]}),
        ("decode", "/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_tokens_are_made_beside_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, name: str, path: str, body: dict[str, Any]
) -> None:
    original, where = getattr(Tokenizer, name), []

    def noted(self: Tokenizer, *given: Any, **named: Any) -> Any:
        where.append(threading.current_thread().name)
        return original(self, *given, **named)

    monkeypatch.setattr(Tokenizer, name, noted)
    assert post(server, path, body).status_code == 200
    assert where
    assert "server" not in where  # the thread of the loop


def test_a_text_that_cannot_fit_is_refused_before_it_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def encode(self: Tokenizer, text: str, **_: object) -> list[int]:
        read.append(len(text))
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    llm = server.app.engine.llm
    long = "a" * (llm.target.max_context * llm.tokenizer.longest_piece)
    client = server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=server.model, prompt=long)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": long}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert read == []
    client.completions.create(model=server.model, prompt=long[:-1], max_tokens=1)
    assert read == [len(long) - 1]
