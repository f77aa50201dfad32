"""python -m bench restarts: the first token of a prompt that an earlier process of the server has read.

Every round reads a new prompt in one server, cold and from memory, ends it, and asks a second server, which
has the first one's folder of pages: from the disk, then from memory. `--reboot` drops the pages from the
system's memory before, so that they come from the device. What writing costs is measured in the first server,
on further prompts: some are kept, some are not (`remember: false`), in turn. After each the client is silent
for two seconds, as while a tool runs, in which pages are written: the processor's time counts it, the first
token does not. `--load N`: that many other clients have answers streamed by both servers all the while.
`--no-preload`: the second server loads nothing before it is asked.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any, Final

from rich.console import Console

from bench import pages
from bench.runs.arms import WARM_UP
from bench.runs.effects import question, tools
from bench.serve import servers
from bench.serve.http_client import Reading, read
from bench.serve.servers import CHAT, RunningServer
from bench.spread import Spread
from bench.table import Column, Table, spread
from paceline import hub, limits
from paceline.text import Tokenizer

MODEL: Final = "smollm2-135m"
TOKENS: Final = 3300
WRITTEN_TOKENS: Final = 2600  # of a prompt on which writing is measured
SILENCE_S: Final = 2.0
LOAD_TOKENS: Final = 128  # of each answer to another client
AGAIN: Final = 3  # requests that find the prompt in memory
Row = dict[str, Any]
Report = Callable[[str], None]

COLUMNS: Final = (
    Column("the prompt is", "found"),
    Column("prompt tokens", "prompt_tokens"),
    Column("of them cached", "cached_tokens"),
    Column("first token, ms", lambda r: spread(r["first_ms"], 1)),
    Column("processor's time, ms", lambda r: spread(r["cpu_ms"], 0)),
)


class Agent:
    """The requests of one agent, with prompts of a given length."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._tokenizer = Tokenizer.load(hub.resolve(model))

    def prompt(self, number: int, tokens: int) -> list[dict[str, Any]]:
        """Another one for each number, from its first word on."""
        rules = [f"Shop {number}: you help its staff."]
        while self._length(rules) < tokens:
            missing = tokens - self._length(rules)
            first = len(rules)
            rules += [
                f"Rule {number}-{i}: look up the order, the customer and parcel {37 * i % 1000} first."
                for i in range(first, first + max(1, missing // 40))
            ]
        return self._messages(rules)

    def _messages(self, rules: Sequence[str]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "\n".join(rules)}, question()]

    def _length(self, rules: Sequence[str]) -> int:
        return len(self._tokenizer.encode_chat(self._messages(rules), tools()))

    def ask(self, port: int, messages: Sequence[dict[str, Any]], remember: bool = True) -> Reading:
        body = {
            "model": self._model,
            "messages": list(messages),
            "tools": tools(),
            "user": "agent",
            "remember": remember,
            "max_tokens": 4,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reading = read(port, CHAT, body)
        reading.first = reading.first or reading.end
        return reading


class Restarts:
    def __init__(
        self,
        model: str,
        threads: int,
        tokens: int,
        reboot: bool,
        report: Report,
        load: int = 0,
        preload: bool = True,
    ) -> None:
        """load: other clients. preload: a server loads what was used last when it starts."""
        self._model, self._threads, self._reboot, self._report = model, threads, reboot, report
        self._tokens, self._load, self._preload = tokens, load, preload
        self._agent = Agent(model)
        self._found: dict[str, list[Reading]] = {}
        self._cpu: dict[str, list[float]] = {}  # seconds

    def round(self, number: int, written: int) -> None:
        """written: pairs of prompts on which writing is measured."""
        disk = "on the disk, after a reboot" if self._reboot else "on the disk, after a restart"
        prompt = self._agent.prompt(number, self._tokens)
        with tempfile.TemporaryDirectory() as folder:
            with self._server(folder) as served:
                self._ask(served, prompt, "new")
                for _ in range(AGAIN):
                    self._ask(served, prompt, "in memory")
                for pair in range(written):
                    for remember in (True, False) if pair % 2 else (False, True):
                        fresh = self._agent.prompt(1000 * (number + 1) + 2 * pair + remember, WRITTEN_TOKENS)
                        self._ask(served, fresh, "new, kept" if remember else "new, not kept", remember)
            if self._reboot:
                _drop_from_memory(Path(folder))
            with self._server(folder) as served:
                self._ask(served, prompt, disk)
                for _ in range(AGAIN):
                    self._ask(served, prompt, "in memory, after a restart")

    def rows(self) -> list[Row]:
        return [
            {
                "found": found,
                "prompt_tokens": readings[-1].prompt_tokens,
                "cached_tokens": readings[-1].cached_tokens,
                "first_ms": asdict(Spread.of([1000 * reading.first for reading in readings])),
                "cpu_ms": asdict(Spread.of([1000 * seconds for seconds in self._cpu[found]])),
            }
            for found, readings in self._found.items()
        ]

    def _ask(
        self, served: RunningServer, prompt: Sequence[dict[str, Any]], found: str, remember: bool = True
    ) -> None:
        before = _cpu_s(served)
        reading = self._agent.ask(served.port, prompt, remember)
        if found.startswith("new"):
            time.sleep(SILENCE_S)
        self._found.setdefault(found, []).append(reading)
        self._cpu.setdefault(found, []).append(_cpu_s(served) - before)
        self._report(f"{found}: {1000 * reading.first:.1f} ms, {reading.cached_tokens} tokens cached")

    @contextmanager
    def _server(self, folder: str) -> Iterator[RunningServer]:
        """It has answered a short prompt once."""
        slots = 2 + self._load
        options = ["--cache-dir", folder, *([] if self._preload else ["--no-preload"])]
        served = servers.paceline(self._model, self._threads, slots, options=options)
        try:
            read(served.port, CHAT, {**WARM_UP, "model": self._model, "user": "warm-up"})
            time.sleep(SILENCE_S)  # the first record of the trace store is being written
            with self._loaded(served.port):
                yield served
        finally:
            served.close()

    @contextmanager
    def _loaded(self, port: int) -> Iterator[None]:
        """Other clients ask one question after another meanwhile."""
        ended = Event()

        def client(number: int) -> None:
            while not ended.is_set():
                text = f"Client {number}: tell a story of a lantern."
                body = {**WARM_UP, "messages": [question(text)], "max_tokens": LOAD_TOKENS}
                read(port, CHAT, {**body, "model": self._model, "user": f"load {number}"})

        with ThreadPoolExecutor(max(1, self._load)) as pool:
            asking = [pool.submit(client, number) for number in range(self._load)]
            try:
                yield
            finally:
                ended.set()
        for one in asking:
            one.result()


def _cpu_s(served: RunningServer) -> float:
    fields = Path(f"/proc/{served.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user, system


def _drop_from_memory(folder: Path) -> None:
    for path in folder.rglob("*.page"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench restarts", description=__doc__)
    made.add_argument("--model", default=MODEL)
    made.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--written", type=int, default=4, help="pairs of prompts a round, kept and not kept")
    made.add_argument("--reboot", action="store_true", help="drop the pages from the system's memory")
    made.add_argument("--load", type=int, default=0, help="other clients, who have answers streamed")
    made.add_argument("--no-preload", action="store_true", help="load nothing before it is asked for")
    made.add_argument("--threads", type=int, default=limits.cores())
    made.add_argument("--write", action="store_true", help="write bench/results and the pages made from it")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    options = parser().parse_args(given)
    servers.end_with_this_process()
    console = Console(width=None if Console().is_terminal else 180)
    how = (options.model, options.threads, options.tokens, options.reboot)
    restarts = Restarts(*how, print, options.load, not options.no_preload)
    for number in range(options.rounds):
        restarts.round(number, options.written)
    rows = restarts.rows()
    console.print(Table.of(COLUMNS, rows, "the first token of a prompt").terminal())
    if options.write:
        flags = {"reboot": options.reboot, "load": options.load, "no-preload": options.no_preload}
        kind = "".join(f"-{name}" for name, given in flags.items() if given)
        name = f"restarts-{options.model}{kind}"
        pages.keep(name, "restarts", given, options.model, rounds=options.rounds, rows=rows)
