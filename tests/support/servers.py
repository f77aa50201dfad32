"""Servers for tests: in a thread or in a process, of the real model or of a tiny one of random weights."""

import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from paceline import EngineConfig
from paceline.paths import home
from paceline.server.app import App
from paceline.server.launch import ServerSettings, build, uvicorn_config
from support.native_targets import tiny_model
from support.tiny_gguf import Sizes
from support.tokenizers import byte_level_facts

START_S = 300  # on a machine that has much else to do
IDLE_S = 120  # there, until something is done that takes no time


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
    """settings: of the server; and `extend`, which gets the application before it starts."""
    extend: Callable[[App], object] = settings.pop("extend", lambda app: None)
    engine = config or EngineConfig(cache_mb=256)
    alone = {"store": "none", "save_estimates": False, "preload": False}
    given = {"model": model, "engine": engine, "drain_s": 0, **alone, **settings}
    chosen = ServerSettings(**given)
    app = build(chosen)
    extend(app)
    server = uvicorn.Server(uvicorn_config(app, chosen, port=0))
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
        assert not thread.is_alive(), "the server does not end"


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Waits; False if it did not come true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


def always_draft(app: App) -> None:
    """To `extend` a server: drafts whatever they cost, so that their number depends on no clock."""
    app.engine.llm.spec = replace(app.engine.llm.spec, adaptive=False)


@contextmanager
def paused(server: Running) -> Iterator[None]:
    """No pass begins meanwhile: requests stay in flight as they are, however fast the machine is."""
    goes_on = threading.Event()

    def wait() -> None:
        goes_on.wait()

    server.app.engine.thread.between_passes(wait)
    try:
        yield
    finally:
        goes_on.set()


MODEL = "smollm2-135m"
QUIET = ("--log-level", "warning")  # nobody reads its output before it ends
COMMAND = (sys.executable, "-c", "from paceline.cli import main; main()")


@dataclass(frozen=True, slots=True)
class Process:
    process: "subprocess.Popen[str]"
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def answers_at(self, address: str) -> bool:
        """True if a connection can be opened."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((address, self.port)) == 0


def free_port() -> int:
    """Below those that the system gives out: no client beside has it before its server does."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def served(*options: str) -> Iterator[Process]:
    """Ready for requests; killed at the end, if it still runs."""
    port = free_port()
    command = [
        *COMMAND,
        "serve",
        MODEL,
        "--port",
        str(port),
        "--cache-mb",
        "256",
        "--threads",
        "1",
        "--cache-disk-mb",
        "0",
        "--no-save-estimates",
        *QUIET,
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        started = Process(process, port)
        _wait_until_ready(started)
        yield started
    finally:
        process.kill()
        process.communicate()


def _wait_until_ready(started: Process) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if started.process.poll() is not None:
            raise AssertionError(f"the server ended before it began: {started.process.communicate()[0]}")
        try:
            if httpx.get(f"{started.url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server did not start in time")


TEMPLATE = """{%- if tools %}<|im_start|>system
Call a tool within <tool_call></tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is not none %}{{ message.content + '' }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name + '' }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAME = "toy"  # of the model


def toy_chat_model(folder: Path, **settings: Any) -> Path:
    """A model file of 1 MB that loads in milliseconds. settings: of tiny_gguf.write."""
    facts = byte_level_facts("smollm")
    sizes = Sizes(2, 256, 4, 2, 64, 256, len(facts["tokens"]), 8192)
    text: dict[str, Any] = {"tokenizer": facts, "template": TEMPLATE}
    return tiny_model(folder / f"{NAME}.gguf", kind="Q8_0", sizes=sizes, **text, **settings)


def own_home(folder: Path) -> Path:
    """A home in this folder, empty or that of an earlier server; compiled code is shared with this one."""
    (home() / "native").mkdir(parents=True, exist_ok=True)
    if not (folder / "home").exists():
        (folder / "home").mkdir()
        (folder / "home" / "native").symlink_to(home() / "native")
    return folder / "home"


@contextmanager
def toy_running(folder: Path, config: EngineConfig | None = None, **settings: Any) -> Iterator[Running]:
    """A server of such a model; what is made for the model stays in the folder, compiled code is shared."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACELINE_HOME", str(own_home(folder)))
            patch.chdir(toy_chat_model(folder).parent)
            engine = config or EngineConfig("cpu", cache_mb=64)
            server = stack.enter_context(running(f"{NAME}.gguf", engine, **settings))
        yield server
