"""Streams stay alive while a long prompt is read: comments for clients that stream, none for the others."""

import asyncio
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from paceline.server.app import App
from support.servers import Running

pytestmark = pytest.mark.model

SILENCE_S, INTERVAL_S = 0.2, 0.05
COMMENT = ": keep-alive"
LONG = "INFO ready\n" * 200  # several passes of prompt


class Listener:
    """Counts the comments of an application while it sends them."""

    def __init__(self, app: Any, enough: int) -> None:
        self.heard = threading.Event()
        self._app, self._missing = app, enough

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def listen(message: Message) -> None:
            self._missing -= message.get("body", b"").count(COMMENT.encode())
            if self._missing <= 0:
                self.heard.set()
            await send(message)

        await self._app(scope, receive, listen)


def post(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    keep_alive_s: float,
    comments: int = 0,
    **body: Any,
) -> httpx.Response:
    """To the same engine, through an application with another interval.

    The second pass begins once so many comments were sent, or after a silence.
    """
    app = App(server.app.models, server.app.admission, server.app.log, keep_alive_s=keep_alive_s)
    listener, engine = Listener(app.asgi(), comments), server.app.engine.llm.engine
    step, passes = engine.step, iter(range(2))

    def slow() -> Any:
        if next(passes, None) == 1:
            if comments:
                assert listener.heard.wait(60)
            else:
                time.sleep(SILENCE_S)
        return step()

    monkeypatch.setattr(engine, "step", slow)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(listener)
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
    asked = {"stream": True, **body, "user": f"comments {path}"}
    told = post(server, monkeypatch, path, INTERVAL_S, comments=2, **asked).text
    parts = told.split("\n\n")
    assert parts.count(COMMENT) >= 2
    assert all(part == COMMENT or "data: " in part for part in parts if part)


@pytest.mark.parametrize("keep_alive_s", [0, 60])
def test_there_are_none_where_they_are_off_or_nothing_is_silent_for_so_long(
    server: Running, monkeypatch: pytest.MonkeyPatch, keep_alive_s: float
) -> None:
    path, body = BODIES[0]
    asked = {"stream": True, **body, "user": f"none {keep_alive_s}"}
    told = post(server, monkeypatch, path, keep_alive_s, **asked).text
    assert COMMENT not in told
    assert told.endswith("data: [DONE]\n\n")


def test_a_client_that_does_not_stream_gets_json_and_nothing_else(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = BODIES[0]
    told = post(server, monkeypatch, path, INTERVAL_S, **body, user="whole")
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
