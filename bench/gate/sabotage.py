"""Candidates that are wrong on purpose: a proxy in front of a good server that spoils its answers.

slower     every chunk comes later
biased     a sampler with another temperature, whose answers do not depend on the seed
schemas    one answer in ten loses its last character, so that its JSON does not end
changed    one answer in ten has another word
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.gate.leg_recorder import SseParser
from paceline.web.streaming import DONE, event

Sabotage = Literal["slower", "biased", "schemas", "changed"]
START_S = 60


@dataclass(frozen=True, slots=True)
class Saboteur:
    """every: of how many answers one is spoiled, by `schemas` and `changed`."""

    url: str
    kind: Sabotage
    delay_s: float = 0.06  # of each chunk, by `slower`
    temperature: float = 0.3  # times the request's, by `biased`
    every: int = 10
    numbers: Iterator[int] = field(default_factory=count)  # of requests
    client: httpx.AsyncClient = field(  # one for all: making one takes longer than a first token may
        default_factory=lambda: httpx.AsyncClient(trust_env=False, timeout=300, verify=False)
    )

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, http: Request) -> Response:
        return JSONResponse((await self.client.get(f"{self.url}/v1/models")).json())

    async def chat(self, http: Request) -> Response:
        body = self._request(await http.json())
        spoiled = next(self.numbers) % self.every == self.every // 2
        if not body.get("stream"):
            answer = await self.client.post(f"{self.url}/v1/chat/completions", json=body)
            return Response(answer.content, answer.status_code, media_type="application/json")
        return StreamingResponse(self._chunks(body, spoiled), media_type="text/event-stream")

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.kind != "biased":
            return body
        without_seed = {name: value for name, value in body.items() if name != "seed"}
        return {**without_seed, "temperature": body.get("temperature", 1.0) * self.temperature}

    async def _chunks(self, body: dict[str, Any], spoiled: bool) -> AsyncIterator[bytes]:
        parser, last = SseParser(), None
        async with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            async for data in response.aiter_raw():
                for part in parser.push(data):
                    if part == b"[DONE]":
                        continue
                    if self.kind == "slower":
                        await asyncio.sleep(self.delay_s)
                    chunk = json.loads(part)
                    if spoiled and _content(chunk):  # the last one is known only when another comes
                        if last is not None:
                            yield event(last)
                        last = chunk
                        continue
                    if last is not None:
                        yield event(self._spoiled(last))
                        last = None
                    yield event(chunk)
        yield DONE

    def _spoiled(self, chunk: dict[str, Any]) -> dict[str, Any]:
        delta = chunk["choices"][0]["delta"]
        if self.kind == "schemas":
            delta["content"] = delta["content"][:-1]
        elif self.kind == "changed":
            delta["content"] = " otherwise"
        return chunk


def _content(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices") or [{}]
    return bool((choices[0].get("delta") or {}).get("content"))


@contextmanager
def sabotaged(url: str, kind: Sabotage, **settings: Any) -> Iterator[str]:
    """The URL of the proxy, in a thread."""
    app = Saboteur(url, kind, **settings).app()
    config = uvicorn.Config(app, "127.0.0.1", 0, log_config=None, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="sabotage", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)
