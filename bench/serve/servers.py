"""Servers to measure: paceline's and llama.cpp's, each a process of its own behind a port of its own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.peers import amx, llama_server
from bench.peers.child import ROOT
from bench.peers.systems import BUILDS
from bench.peers.wire import Load
from bench.serve.http_client import get, read

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
START_S: Final = 300.0
END_S: Final = 20.0
PAGE_KB: Final = 1024
LLAMA_BUILD: Final = next(b for b in BUILDS if b.driver == "llama_server" and "binary" in b.files)


@dataclass
class RunningServer:
    """A running server."""

    system: str
    port: int
    process: "subprocess.Popen[bytes]"
    folder: "tempfile.TemporaryDirectory[str]"
    version: str = ""

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    @property
    def resident_mb(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / PAGE_KB
        return 0.0

    @property
    def log(self) -> str:
        return (Path(self.folder.name) / "log").read_text(errors="replace")


@dataclass(frozen=True)
class ServerMode:
    """A server and how it is asked: a row of results is about one."""

    system: str
    mode: str
    served: RunningServer = field(compare=False, hash=False)
    more: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)  # into every body

    @property
    def name(self) -> str:
        return f"{self.system} {self.mode}"

    @property
    def ours(self) -> bool:
        return self.system == "paceline"

    def body(self, prompt: Sequence[int], max_tokens: int, user: str, slot: int, turn: int) -> dict[str, Any]:
        """The first turn of a user is new to every cache."""
        request: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "seed": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.more,
        }
        if self.ours:
            return request | {"user": user}
        return request | {"cache_prompt": turn > 0, "id_slot": slot, "samplers": ["temperature"]}


def end_with_this_process() -> None:
    """Asked to end, a benchmark ends its servers first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(
    system: str,
    command: Sequence[str],
    port: int,
    ready: str,
    environment: Mapping[str, str],
    folder: "tempfile.TemporaryDirectory[str]",
    start_s: float = START_S,
) -> RunningServer:
    """Waits until it answers; what it prints is in a log in the folder, which goes when it ends."""
    with (Path(folder.name) / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    served = RunningServer(system, port, process, folder)
    until = time.monotonic() + start_s
    while not _answers(port, ready):
        if process.poll() is not None or time.monotonic() > until:
            last = served.log.strip().splitlines()[-1:]
            served.close()
            raise RuntimeError(f"{system} did not start (exit {process.poll()}): {''.join(last)[:300]}")
        time.sleep(0.1)
    return served


def _answers(port: int, path: str) -> bool:
    with suppress(OSError):
        return get(port, path)[0] == 200
    return False


def paceline(
    model: str,
    threads: int,
    slots: int,
    cache_mb: int = 1024,
    store: str = "",
    options: Sequence[str] = (),
    module: str = "paceline",
) -> RunningServer:
    """With a trace store of its own, as it is by default, and no estimates of earlier runs.

    module: it has paceline's command line.
    """
    port, folder = free_port(), tempfile.TemporaryDirectory()
    command = [sys.executable, "-m", module, "serve", model, "--served-model-name", model, *options]
    command += ["--port", str(port)]
    command += ["--threads", str(threads), "--max-batch", str(slots), "--cache-mb", str(cache_mb)]
    command += ["--store", store or f"{folder.name}/traces.db", "--no-save-estimates"]
    command += [] if "--cache-dir" in options else ["--cache-disk-mb", "0"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    served = start("paceline", command, port, "/ready", {"PYTHONPATH": path}, folder)
    served.version = get(port, "/version")[1]
    return served


def llama_installed() -> bool:
    return LLAMA_BUILD.installed


def llama(
    model: Path,
    mode: str,
    threads: int,
    slots: int,
    context: int,
    cache_ram_mb: int = 0,
    options: Sequence[str] = (),
) -> RunningServer | None:
    """In the faster of the ways that this machine leaves; None if it is not installed.

    context: tokens of each slot. cache_ram_mb: for prompts that no slot holds any more.
    """
    if not llama_installed():
        return None
    build = LLAMA_BUILD
    made: dict[float, RunningServer] = {}
    for choice in amx.choices(build.driver):
        port = free_port()
        settings = {**build.settings, **choice.settings, "slots": slots, "cache_ram_mb": cache_ram_mb}
        load = Load(str(model), mode, threads, context * slots, settings=settings)
        command = [settings["binary"], *llama_server.arguments(load, port), *options]
        with suppress(RuntimeError):
            served = start(
                "llama.cpp", command, port, "/health", choice.environment, tempfile.TemporaryDirectory()
            )
            made[_warm(served)] = served
            served.version = choice.name
    if not made:
        raise RuntimeError(f"llama-server does not start in mode {mode}")
    best = made.pop(min(made))
    for other in made.values():
        other.close()
    return best


def _warm(served: RunningServer) -> float:
    """Seconds of an answer after one for warming."""
    body = ServerMode("llama.cpp", "plain", served).body(range(100, 356), 16, "", 0, 0)
    return [read(served.port, COMPLETIONS, body).last for _ in "12"][-1]
