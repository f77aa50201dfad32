"""Streams stay alive while a long prompt is read: comments for clients that stream, none for the others."""

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from paceline.server.app import App
from support.servers import Running

pytestmark = pytest.mark.model

SILENCE_S, INTERVAL_S = 0.4, 0.05
LONG = "INFO ready\n" * 200  # several passes of prompt


def slow_passes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass that begins after the first has been told of takes long."""
    engine = server.app.engine.llm.engine
    step, passes = engine.step, iter(range(2))

    def slow() -> Any:
        if next(passes, None) == 1:
            time.sleep(SILENCE_S)
        return step()

    monkeypatch.setattr(engine, "step", slow)


def post(server: Running, path: str, keep_alive_s: float, **body: Any) -> httpx.Response:
    """To the same engine, through an application with another interval."""
    app = App(server.app.models, server.app.admission, server.app.log, keep_alive_s=keep_alive_s)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json={"model": server.model, **body}, timeout=60)

    return asyncio.run(send())


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_a_stream_gets_comments_while_its_prompt_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    slow_passes(server, monkeypatch)
    told = post(server, path, INTERVAL_S, stream=True, **body, user=f"comments {path}").text
    parts = told.split("\n\n")
    assert parts.count(": keep-alive") >= 2
    assert all(part == ": keep-alive" or "data: " in part for part in parts if part)


@pytest.mark.parametrize("keep_alive_s", [0, 60])
def test_there_are_none_where_they_are_off_or_nothing_is_silent_for_so_long(
    server: Running, monkeypatch: pytest.MonkeyPatch, keep_alive_s: float
) -> None:
    slow_passes(server, monkeypatch)
    path, body = BODIES[0]
    told = post(server, path, keep_alive_s, stream=True, **body, user=f"none {keep_alive_s}").text
    assert "keep-alive" not in told
    assert told.endswith("data: [DONE]\n\n")


def test_a_client_that_does_not_stream_gets_json_and_nothing_else(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_passes(server, monkeypatch)
    path, body = BODIES[0]
    told = post(server, path, INTERVAL_S, **body, user="whole")
    assert told.headers["content-type"] == "application/json"
    assert told.text.startswith("{")
    assert told.json()["usage"]["completion_tokens"] == 2


def test_the_openai_client_skips_comments(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.web.streaming.with_keep_alive", _commented)
    client: openai.OpenAI = server.client()
    asked: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 4, "seed": 1}
    stream = client.chat.completions.create(model=server.model, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    monkeypatch.undo()
    whole = client.chat.completions.create(model=server.model, **asked)
    assert text == whole.choices[0].message.content


async def _commented(first: Any, events: Any, interval_s: float, failure: Any) -> Any:
    yield await first
    async for event in events:
        yield b": keep-alive\n\n"
        yield event
