"""The servers of `python -m bench runs`, and how each is asked.

llama.cpp's server has one slot: runs follow one another, and each slot would take its part of the context.
Prompts are cached in the slot and, for other conversations, in 8 GiB of memory (`--cache-ram`, its default).
`--cache-reuse` is among the settings that can be tried: it moves keys of a changed prompt to new positions,
which no run needs, as each turn continues the last. Nothing of it outlasts the process unless a client saves
a slot by hand and restores it (`--slot-save-path`): before a run that has been seen, this client does, and
the time counts.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from bench.serve import servers
from bench.serve.http_client import Refused, post, read
from bench.serve.servers import CHAT, RunningServer

PLAIN: Final = "paceline plain"
OURS: Final = "paceline"
LLAMA: Final = "llama.cpp"
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
