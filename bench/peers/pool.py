"""The children of one run, kept loaded while memory lasts: so systems can take turns prompt by prompt."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.peers import amx
from bench.peers.child import Child, PeerFailed
from bench.peers.systems import NEED_DRAFT, Entry
from bench.peers.wire import Answer
from paceline import limits

RESERVE_MB: Final = 1500  # left to the system and to answers that grow
UNKNOWN: Final = 6  # a system not seen yet may hold that many times the model's file
LOAD_PATIENCE: Final = 300.0  # seconds
MIN_PATIENCE: Final = 30.0
WARM: Final = 16  # tokens of each of the two warm-up answers


@dataclass
class Pool:
    model: Path
    threads: int
    context: int
    warm_up: list[int]  # a prompt that is never measured
    say: Callable[[str], None] = print
    patience: float = 240.0  # seconds for one answer
    peaks: dict[Entry, float] = field(default_factory=dict)
    versions: dict[Entry, str] = field(default_factory=dict)
    _alive: dict[Entry, Child] = field(default_factory=dict)
    _chosen: dict[tuple[str, str], amx.Choice] = field(default_factory=dict)

    def get(self, entry: Entry) -> Child:
        """The entry's child, loaded and warm."""
        if entry not in self._alive:
            self._make_room(entry)
            self._alive[entry] = self._start(entry)
        return self._alive[entry]

    def generate(self, entry: Entry, **ask: Any) -> Answer:
        try:
            return self.get(entry).generate(self.patience, **ask)
        except PeerFailed:
            self.drop(entry)
            raise

    def drop(self, entry: Entry) -> None:
        """Ends the entry's child, with all it remembers."""
        child = self._alive.pop(entry, None)
        if child is None:
            return
        try:
            self.peaks[entry] = max(self.peaks.get(entry, 0.0), child.peak_mb())
        except PeerFailed:
            pass
        finally:
            child.close()

    def close(self) -> None:
        for entry in list(self._alive):
            self.drop(entry)

    def _start(self, entry: Entry) -> Child:
        kind = entry.build.driver, entry.build.environment
        if kind not in self._chosen:
            self._chosen[kind] = self._faster(entry)
        child, _ = self._open(entry, self._chosen[kind])
        self.versions[entry] = child.version
        return child

    def _faster(self, entry: Entry) -> amx.Choice:
        """The way to start this system here that answers the warm-up soonest."""
        choices = amx.choices(entry.build.driver)
        if len(choices) == 1:
            return choices[0]
        seconds: dict[int, float] = {}
        problem = PeerFailed("no way to start it")
        for number, choice in enumerate(choices):
            try:
                child, seconds[number] = self._open(entry, choice)
            except PeerFailed as failed:
                problem = failed
            else:
                child.close()
        if not seconds:
            raise problem
        best = choices[min(seconds, key=lambda n: seconds[n])]
        self.say(f"{entry.system}: {best.name} is the faster way to do without AMX")
        return best

    def _open(self, entry: Entry, choice: amx.Choice) -> tuple[Child, float]:
        child = Child(entry.build.command, choice.environment)
        draft = str(self.model) if entry.mode in NEED_DRAFT else None
        try:
            child.load(
                LOAD_PATIENCE,
                model=str(self.model),
                mode=entry.mode,
                threads=self.threads,
                context=self.context,
                draft=draft,
                settings={**entry.build.settings, **choice.settings},
            )
            warm = [child.generate(self.patience, prompt=self.warm_up, max_tokens=WARM) for _ in "12"]
        except PeerFailed:
            child.close()
            raise
        return child, warm[-1].total

    def _make_room(self, entry: Entry) -> None:
        """Ends others, those first that are soonest loaded again, until this one fits."""
        guess = UNKNOWN * self.model.stat().st_size / 2**20
        needed = self.peaks.get(entry, guess) + RESERVE_MB
        while self._alive and available_mb() < needed:
            self.drop(min(self._alive, key=lambda e: self._alive[e].load_seconds))


def available_mb() -> float:
    """Memory that can be had; plenty where the system does not say."""
    available = limits.available_memory()
    return float("inf") if available is None else available / 2**20
