"""The real application behind a real port, in a thread of this process, for tests and examples."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn

from paceline import EngineConfig
from paceline.server.app import App
from paceline.server.launch import ServerSettings, asgi, build

START_S = 300  # on a machine that has much else to do
IDLE_S = 20


@dataclass(frozen=True, slots=True)
class Running:
    app: App
    url: str  # without /v1

    @property
    def model(self) -> str:
        return self.app.engine.llm.name

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    @property
    def in_flight(self) -> int:
        """Requests in the engine, running or waiting."""
        thread = self.app.engine.thread
        return thread.running + thread.waiting


@contextmanager
def running(model: str, config: EngineConfig | None = None, **settings: Any) -> Iterator[Running]:
    engine = config or EngineConfig(cache_mb=256)
    chosen = ServerSettings(**{"model": model, "engine": engine, "store": "none", **settings})
    app = build(chosen)
    server = uvicorn.Server(
        uvicorn.Config(
            asgi(app, chosen), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5
        )
    )
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), START_S)
        assert server.started, "the server ended before it began: its log says why"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(app, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(START_S)


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Waits; False if it did not come true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return holds()
