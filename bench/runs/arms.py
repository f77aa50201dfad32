"""The servers of `python -m bench runs`, and how each is asked.

llama.cpp's server has one slot: runs follow one another, and each slot would take its part of the context.
Prompts are cached in the slot and, for other conversations, in 8 GiB of memory (`--cache-ram`, its default).
`--cache-reuse` is among the settings that can be tried: it moves keys of a changed prompt to new positions,
which no run needs, as each turn continues the last. Nothing of it outlasts the process unless a client saves
a slot by hand and restores it (`--slot-save-path`): before a run that has been seen, this client does, and
the time counts.

vLLM and `transformers serve` read no GGUF file on a CPU: they run the same weights in float32, of which every
pass reads eight times as many bytes as of 4-bit weights. vLLM keeps prefixes in memory (its default),
Transformers keeps nothing from one request to the next; nothing of either outlasts its process. Where a
model's template knows no tools (SmolLM2's), they leave tools out of the prompt: the column of prompt tokens
shows it.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from bench.peers.systems import BUILDS
from bench.serve import servers
from bench.serve.http_client import Refused, post, read
from bench.serve.servers import CHAT, RunningServer, free_port, start
from bench.vllm import server as vllm

PLAIN: Final = "paceline plain"
OURS: Final = "paceline"
LLAMA: Final = "llama.cpp"
VLLM: Final = "vllm"
TRANSFORMERS: Final = "transformers"
NO_TRANSFORMERS: Final = "Transformers is not here: run `make bench-peers`"
CACHE_RAM_MB: Final = 8192
LLAMA_SETTINGS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {  # a mode of bench.peers, and options
    "plain": ("plain", ()),
    "no-flash-attn": ("plain", ("--flash-attn", "off")),
    "cache-reuse": ("plain", ("--cache-reuse", "256")),
    "ngram-short": ("ngram-short", ()),
    "ngram-cache": ("ngram-cache", ()),
}
USER: Final = {"user": "agent"}  # one tenant, as one agent with its key
NO_DRAFTS: Final = {"speculative_config": {"disabled": True}, "remember": False, "user": "plain"}
WARM_UP: Final = {
    "messages": [{"role": "user", "content": "Count from one to ten in words."}],
    "max_tokens": 16,
    "temperature": 0.0,
    "stream": True,
}


class Server(Protocol):
    """A kind of server: a new process has no cache but the one in its folder."""

    @property
    def name(self) -> str: ...
    def start(self, folder: Path) -> RunningServer: ...
    def save(self, served: RunningServer, head: str) -> None:
        """Called in the earlier process, when it has read the head of a conversation."""

    def restore(self, served: RunningServer, head: str) -> None:
        """Called in the later process, before a conversation with this head."""


@dataclass(frozen=True)
class Arm:
    """A server and how it is asked."""

    name: str
    server: Server = field(hash=False, compare=False)
    body: Mapping[str, Any] = field(hash=False, compare=False)


@dataclass(frozen=True)
class PacelineServer:
    model: str
    threads: int
    cache_mb: int = 1024
    name: str = OURS

    def start(self, folder: Path) -> RunningServer:
        disk = ["--cache-dir", str(folder)]
        served = servers.paceline(self.model, self.threads, 2, self.cache_mb, options=disk)
        read(served.port, CHAT, {**WARM_UP, "user": "warm-up"})
        return served

    def save(self, served: RunningServer, head: str) -> None:
        """Its pages are written in the background."""

    def restore(self, served: RunningServer, head: str) -> None:
        """They are read when a prompt begins with them."""


@dataclass(frozen=True)
class LlamaServer:
    model: Path
    setting: str
    threads: int
    context: int

    @property
    def name(self) -> str:
        return f"{LLAMA} {self.setting}"

    @property
    def options(self) -> tuple[str, ...]:
        return LLAMA_SETTINGS[self.setting][1]

    def start(self, folder: Path) -> RunningServer:
        more = [*self.options, "--slot-save-path", str(folder)]
        mode = LLAMA_SETTINGS[self.setting][0]
        served = servers.llama(self.model, mode, self.threads, 1, self.context, CACHE_RAM_MB, more)
        if served is None:
            raise RuntimeError("llama.cpp's server is not installed: run `make bench-peers`")
        read(served.port, CHAT, WARM_UP)
        return served

    def save(self, served: RunningServer, head: str) -> None:
        self._slot(served, "save", head)

    def restore(self, served: RunningServer, head: str) -> None:
        self._slot(served, "restore", head)

    def _slot(self, served: RunningServer, action: str, head: str) -> None:
        status, text = post(served.port, f"/slots/0?action={action}", {"filename": f"{head}.bin"})
        if status != 200:
            raise Refused(status, text)


def transformers_python() -> Path | None:
    """The environment of `make bench-peers`, or vLLM's, which has most of what its server needs."""
    build = next(build for build in BUILDS if build.environment == TRANSFORMERS)
    return build.python if build.installed else vllm.vllm_python()


@dataclass(frozen=True)
class FloatServer:
    """vLLM's server or Transformers', which keep nothing on the disk. model: a folder with float weights."""

    model: Path
    name: str
    threads: int
    context: int

    def start(self, folder: Path) -> RunningServer:
        served = self._vllm() if self.name == VLLM else self._transformers()
        read(served.port, CHAT, {**WARM_UP, "model": str(self.model)})
        return served

    def _vllm(self) -> RunningServer:
        options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        options += ["--enable-prompt-tokens-details"]  # how many came from its cache
        return vllm.started(self.model, None, options, self.threads, max_model_len=self.context)

    def _transformers(self) -> RunningServer:
        python = transformers_python()
        if python is None:
            raise RuntimeError(NO_TRANSFORMERS)
        port, folder = free_port(), tempfile.TemporaryDirectory()
        command = [str(python), "-m", "transformers.cli.transformers", "serve", str(self.model)]
        command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
        environment = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        return start(self.name, command, port, "/health", environment, folder, vllm.START_S)

    def save(self, served: RunningServer, head: str) -> None:
        """It cannot."""

    def restore(self, served: RunningServer, head: str) -> None:
        """It cannot."""


def float_arm(server: FloatServer) -> Arm:
    return Arm(server.name, server, {"model": str(server.model)})


def paceline_arms(server: PacelineServer, plain: bool) -> list[Arm]:
    """Plain decoding, with a tenant of its own in the same process: neither finds the other's pages."""
    drafting = Arm(OURS, server, USER)
    return [drafting, Arm(PLAIN, server, NO_DRAFTS)] if plain else [drafting]


def llama_arm(server: LlamaServer) -> Arm:
    return Arm(server.name, server, {"cache_prompt": True, "samplers": ["temperature"]})


def copied(source: Path, target: Path) -> Path:
    """A folder as an earlier process left it, so that every round finds the same."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def command_line(served: RunningServer) -> str:
    """With the names of files instead of their paths, and ... for temporary ones."""
    words: Sequence[str] = list(map(str, served.process.args))  # type: ignore[arg-type]
    return " ".join(_short(word) for word in words)


def _short(word: str) -> str:
    if word.startswith(tempfile.gettempdir()):
        return "..."
    return Path(word).name if word.startswith("/") else word
