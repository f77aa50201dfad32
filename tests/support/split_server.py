"""A server of a tiny model that takes drafts of clients, and the same model beside it for plain text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, EngineConfig, SamplingParams, SpecConfig
from paceline.server.app import App
from paceline.split.cloud import SplitLimits, SplitServing, mount
from paceline.split.wire import MAX_OPEN_BYTES
from support.servers import NAME, Running, toy_running

PLAIN = SpecConfig(("none",), max_draft=0)
LONG_MS = 60_000  # that servers of tests wait for a draft, if they are asked to: no machine is that slow
GENEROUS = SplitLimits(
    detached_s=20,
    hello_timeout_s=60,
    idle_timeout_s=600,
    write_timeout_s=600,
    max_wait_s=LONG_MS / 1000,
    max_reading_s=600,
    max_patience_s=600,
)


@dataclass
class SplitServer:
    running: Running
    split: SplitServing
    llm: LLM
    plain: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def tokens(self, body: dict[str, Any]) -> tuple[int, ...]:
        """The text of plain decoding, by a model of its own."""
        name = repr(sorted(body.items()))
        if name not in self.plain:
            given = ("temperature", "seed", "max_tokens")
            params = SamplingParams(**{key: body[key] for key in given})
            self.plain[name] = self.llm.generate(body["prompt"], params, spec=PLAIN).token_ids
        return self.plain[name]


def mount_untimed(app: App, limits: SplitLimits | None = None) -> SplitServing:
    """Times have no part in what such a server drafts and verifies: no controller weighs them."""
    app.engine.llm.spec = replace(app.engine.llm.spec, adaptive=False)
    return mount(app, limits or GENEROUS)


def started(
    folder: Path, limits: SplitLimits | None = None, **settings: Any
) -> "Iterator[tuple[Running, SplitServing]]":
    made: list[SplitServing] = []

    def extend(app: App) -> None:
        made.append(mount_untimed(app, limits))

    with toy_running(folder, extend=extend, max_message=MAX_OPEN_BYTES, **settings) as running:
        yield running, made[0]


@pytest.fixture(scope="session")
def split_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitServer]:
    folder = tmp_path_factory.mktemp("split")
    for running, split in started(folder):
        llm = LLM(str(folder / f"{NAME}.gguf"), config=EngineConfig("cpu", cache_mb=64))
        yield SplitServer(running, split, llm)


Start = Callable[..., tuple[Running, SplitServing]]


@pytest.fixture
def start_split(tmp_path: Path) -> Iterator[Start]:
    """A server with other limits or settings, for one test."""
    open_ones = []

    def one(limits: SplitLimits | None = None, **settings: Any) -> tuple[Running, SplitServing]:
        server = started(tmp_path, limits, **settings)
        open_ones.append(server)
        return next(server)

    yield one
    for server in open_ones:
        next(server, None)
