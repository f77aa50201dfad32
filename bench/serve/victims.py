"""A meter for ordinary clients of a server: gaps between the chunks of their streams, /health, memory.

Every request is sent twice, with drafts and without, and both texts must be equal. Gaps and latencies have
their moments, which tell those during an attack from the others.
"""

import http.client
import random
import statistics
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from bench.serve.http_client import Reading, Refused, events, get, take
from bench.serve.servers import CHAT, COMPLETIONS
from bench.serve.soak_load import PATIENCE, BackgroundThreads
from paceline import SpecConfig

HEALTH_EVERY_S: Final = 0.1
MEMORY_EVERY_S: Final = 0.5
DEFAULT: Final = {"speculative_config": {"drafters": list(SpecConfig().drafters)}}
DISABLED: Final = {"speculative_config": {"disabled": True}}
TOPICS: Final = ("rivers", "bread", "trains", "maps", "winter", "clocks", "bridges", "tea", "sorting")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, by time.monotonic."""

    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(slots=True)
class Records:
    """All that the meter has seen; filled by many threads."""

    gaps: list[Span] = field(default_factory=list)  # between two chunks of a stream
    health: list[Span] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # moment, resident MB
    pairs: int = 0
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)  # of ordinary requests
    lock: threading.Lock = field(default_factory=threading.Lock)


def during(spans: Sequence[Span], windows: Sequence[Span], inside: bool = True) -> list[Span]:
    """The spans that overlap one of the windows, or those that overlap none."""
    ordered = sorted(windows, key=lambda window: window.start)
    starts, ends = [w.start for w in ordered], list(accumulate((w.end for w in ordered), max))

    def overlaps(span: Span) -> bool:
        before = bisect_left(starts, span.end)  # windows that start before its end
        return before > 0 and ends[before - 1] > span.start

    return [span for span in spans if overlaps(span) == inside]


def milliseconds(spans: Sequence[Span], share: float) -> float:
    """A quantile of their durations: 0.5 the median, 1 the longest; 0 without spans."""
    ordered = sorted(span.seconds for span in spans)
    if not ordered:
        return 0.0
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def resident_mb(pid: int) -> float:
    """Summed over a process and all that it has started."""
    total = 0.0
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                total += int(line.split()[1]) / 1024
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident_mb(int(child)) for child in (thread / "children").read_text().split())
    return total


def ordinary_body(rng: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A chat or a completion, greedy or sampled: its path and body."""
    sampled = rng.random() < 0.5
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": rng.randint(24, 96),
        "temperature": 0.8 if sampled else 0.0,
        "seed": rng.randrange(1 << 31),
        "user": f"user-{rng.randrange(4)}",
    }
    subject = f"{rng.choice(TOPICS)} and {rng.choice(TOPICS)}, {rng.randrange(1000)} words"
    if rng.random() < 0.5:
        return CHAT, {**body, "messages": [{"role": "user", "content": f"Write about {subject}."}]}
    return COMPLETIONS, {**body, "prompt": f"def about_{subject.replace(' ', '_')}(x):\n    "}


class Victims(BackgroundThreads):
    """Runs while entered: streams of ordinary requests, a probe of /health, a sampler of memory."""

    def __init__(self, port: int, pid: int, model: str, streams: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.records = Records()
        self._port, self._pid, self._model = port, pid, model
        jobs = [(self._stream, (random.Random(f"{seed} victim {i}"),)) for i in range(streams)]
        self._threads = [threading.Thread(target=job, args=args, daemon=True) for job, args in jobs]
        self._threads += [threading.Thread(target=job, daemon=True) for job in (self._health, self._memory)]

    def _stream(self, rng: random.Random) -> None:
        while not self._ending.is_set():
            path, body = ordinary_body(rng, self._model)
            try:
                texts = [self._read(path, {**body, **more}) for more in (DEFAULT, DISABLED)]
            except TimeoutError:
                self.records.stuck.append(f"{path}: {str(body)[:200]}")
            except Refused as refused:
                self.records.refused.append((refused.status, str(refused)))
                self._ending.wait(0.2)
            except (OSError, http.client.HTTPException) as problem:
                self.records.refused.append((0, f"connection lost: {type(problem).__name__}: {problem}"))
                self._ending.wait(0.2)
            else:
                self._compare(texts)

    def _compare(self, texts: Sequence[str]) -> None:
        with self.records.lock:
            self.records.pairs += 1
            if texts[0] != texts[1]:
                self.records.wrong.append(f"{texts[0]!r:.200} with drafts, {texts[1]!r:.200} without")

    def _read(self, path: str, body: dict[str, Any]) -> str:
        reading, last = Reading(), 0.0
        for event in events(self._port, path, {**body, "stream": True}, PATIENCE):
            now = time.monotonic()
            take(reading, event, now)
            if last and reading.events > 2:  # the first chunks come with the end of the prompt's pass
                self.records.gaps.append(Span(last, now - last))
            last = now
        if not reading.finish:
            raise Refused(0, "a stream ended without a finish_reason")
        return reading.text

    def _health(self) -> None:
        while not self._ending.wait(HEALTH_EVERY_S):
            start = time.monotonic()
            try:
                get(self._port, "/health", PATIENCE)
            except (OSError, http.client.HTTPException) as problem:
                self.records.refused.append((0, f"/health: {type(problem).__name__}: {problem}"))
            else:
                self.records.health.append(Span(start, time.monotonic() - start))

    def _memory(self) -> None:
        while not self._ending.wait(MEMORY_EVERY_S):
            self.records.memory.append((time.monotonic(), resident_mb(self._pid)))


def memory_between(records: Records, start: float, end: float) -> float:
    """The median of the samples; 0 without any."""
    samples = [mb for moment, mb in records.memory if start <= moment <= end]
    return round(statistics.median(samples), 1) if samples else 0.0
