"""Upstreams for tests of the gate: real HTTP servers whose answers follow the `model` of a request."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvicorn
import yaml
from starlette.types import Receive, Scope, Send

from paceline.gate.gateway.app import GateApp
from paceline.gate.gateway.launch import GateSettings, build, uvicorn_config
from paceline.server.page.assets import ASSETS, PageAssets
from paceline.web.streaming import DONE, event
from support.servers import START_S, until

WORDS = ("one ", "two ", "three ", "four ")


class Cut(Exception):
    """Ends a connection within a stream."""


@dataclass
class Upstream:
    """`behaviour` by its name; changed while it runs. Requests wait for `hold`, if it is set."""

    name: str
    behaviour: str = "answer"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies, with their headers
    cancelled: int = 0
    hold: threading.Event | None = None
    metrics: str | None = None  # the text of /metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/models":
            data = [{"id": f"{self.name}-model", "object": "model", "created": 1, "owned_by": self.name}]
            await _whole(send, 200, {"object": "list", "data": data})
            return
        if scope["path"] == "/metrics":
            await _send(send, 404 if self.metrics is None else 200, (self.metrics or "").encode())
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = json.loads(body)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append({**request, "headers": headers})
        try:
            await self._answer(request, receive, send)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: dict[str, Any], receive: Receive, send: Send) -> None:
        behaviour = self.behaviour
        if self.hold is not None:
            while not self.hold.is_set():
                await asyncio.sleep(0.005)
        if behaviour.startswith("status "):
            status = int(behaviour.split()[1])
            await _whole(send, status, {"error": {"message": f"{self.name} says {status}", "type": "x"}})
            return
        if behaviour == "drop":
            raise Cut
        if not request.get("stream"):
            await _whole(send, 200, self._completion(request))
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream"), (b"x-own", self.name.encode())],
            }
        )
        async for part in self._events(request, behaviour, receive):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(
        self, request: dict[str, Any], behaviour: str, receive: Receive
    ) -> AsyncIterator[bytes]:
        if behaviour == "comment, then cut":
            yield b": keep-alive\n\n"
            await asyncio.sleep(0.05)
            raise Cut
        if behaviour == "endless":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                yield self._chunk("more ")
                await asyncio.wait([gone], timeout=0.02)
            self.cancelled += 1
            return
        if behaviour == "count":
            for number in range(50):
                yield self._chunk(f"{number} ")
                await asyncio.sleep(0.001)
        for number, word in enumerate((self.name + " ", *WORDS)):
            whole = self._chunk(word)
            if behaviour == "cut" and number == 2:
                yield whole[: len(whole) // 2]
                await asyncio.sleep(0.05)  # so that the half is on its way
                raise Cut
            if behaviour == "stall" and number == 2:
                await asyncio.sleep(60)
            half = len(whole) // 2  # events come in pieces
            yield whole[:half]
            yield whole[half:]
        yield self._chunk("", "stop")
        if (request.get("stream_options") or {}).get("include_usage"):
            yield event({**self._chunk_data(""), "choices": [], "usage": self._usage()})
        if behaviour != "no done":
            yield DONE

    def _chunk(self, content: str, finish: str | None = None) -> bytes:
        return event(self._chunk_data(content, finish))

    def _chunk_data(self, content: str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self.name,
            "choices": [choice],
        }

    def _completion(self, request: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.name + " " + "".join(WORDS)}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": self.name,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


async def _whole(send: Send, status: int, body: dict[str, Any]) -> None:
    await _send(send, status, json.dumps(body).encode(), b"application/json")


async def _send(send: Send, status: int, data: bytes, kind: bytes = b"text/plain") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


@contextmanager
def serving(config: uvicorn.Config) -> Iterator[str]:
    """The URL of a server in a thread."""
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="uvicorn", daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), START_S)
        assert server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def upstream(name: str) -> Iterator[Upstream]:
    one = Upstream(name)
    with serving(
        uvicorn.Config(
            one, "127.0.0.1", 0, log_config=None, log_level="critical", timeout_graceful_shutdown=1
        )
    ) as url:
        one.url = url
        yield one


@dataclass(frozen=True)
class Gate:
    app: GateApp
    url: str

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)


@contextmanager
def gate(folder: Path, config: dict[str, Any], **settings: Any) -> Iterator[Gate]:
    file = folder / "gate.yaml"
    file.write_text(yaml.safe_dump(config))
    chosen = GateSettings(str(file), drain_s=0, **settings)
    page = PageAssets()
    app = build(chosen, {"/": page.index, ASSETS: page.asset})
    with serving(uvicorn_config(app, chosen, port=0)) as url:
        yield Gate(app, url)
