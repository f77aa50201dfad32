"""An OpenAI-compatible server whose answers a function of the request writes, a word for each chunk."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.web.streaming import DONE, event
from support.upstreams import serving

Answer = Callable[[dict[str, Any]], str]


@dataclass
class ScriptedModel:
    answer: Answer
    delay_s: float = 0.0  # before each chunk
    logprobs: list[dict[str, Any]] | None = None  # of an answer that is not streamed
    requests: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _chat(self, http: Request) -> Response:
        request = await http.json()
        self.requests.append(request)
        text = self.answer(request)
        if not request.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": self.logprobs}}
            return JSONResponse({"id": "1", "model": "scripted", "choices": [choice]})
        return StreamingResponse(self._chunks(text), media_type="text/event-stream")

    async def _chunks(self, text: str) -> AsyncIterator[bytes]:
        words = text.split(" ")
        for i, word in enumerate(words):
            await asyncio.sleep(self.delay_s)
            yield _chunk({"content": f" {word}" if i else word})
        yield _chunk({}, "stop")
        usage = {"prompt_tokens": 9, "completion_tokens": len(words)}
        yield event({"id": "1", "model": "scripted", "choices": [], "usage": usage})
        yield DONE


def _chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return event({"id": "1", "model": "scripted", "choices": [choice]})


@contextmanager
def scripted(answer: Answer, **settings: Any) -> Iterator[tuple[str, ScriptedModel]]:
    model = ScriptedModel(answer, **settings)
    config = uvicorn.Config(model.app(), "127.0.0.1", 0, log_config=None, log_level="critical")
    with serving(config) as url:
        yield url, model


def last_words(request: dict[str, Any]) -> str:
    return str(json.loads(json.dumps(request["messages"][-1]["content"])))
