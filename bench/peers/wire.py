"""The child's half of the protocol: one JSON request a line in, one JSON answer a line out.

    {"do": "load", "model", "mode", "threads", "context", "draft", "settings"} -> {"version", "seconds"}
    {"do": "generate", "prompt", "max_tokens", "temperature", "seed", "ends", "ignore_eos", "user", "learn"}
        -> {"tokens", "ttft", "total", "passes"}
    {"do": "end"} -> {"peak_mb"}

and of the systems whose passes can be reached one by one:

    {"do": "pass", "context", "rows"} -> {"seconds"}
    {"do": "logits", "tokens", "file"} -> {"rows"}

Any answer may be {"error": text} instead. This file runs in every peer's environment: standard library only.
"""

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

PAGE_KB = 1024


@dataclass(frozen=True)
class Load:
    """The system to get ready."""

    model: str  # a GGUF file
    mode: str = "plain"
    threads: int = 2
    context: int = 4096
    draft: str | None = None  # a second GGUF file, for modes with a draft model
    settings: dict[str, Any] = field(default_factory=dict)  # of this one system


@dataclass(frozen=True)
class Ask:
    """One prompt to continue. Nothing remembered from an earlier one may help."""

    prompt: list[int]
    max_tokens: int = 128
    temperature: float = 0.0  # the only sampling setting: no top-k, no top-p, no penalties
    seed: int = 0
    ends: list[int] = field(default_factory=list)  # tokens that end an answer
    ignore_eos: bool = False
    user: str = ""  # whose prompt it is; only systems that keep users apart heed it
    learn: bool = False  # it is not measured, and may be remembered for its user's other prompts

    @property
    def stops(self) -> set[int]:
        return set() if self.ignore_eos else set(self.ends)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    ttft: float  # seconds to the first token
    total: float  # seconds to the last
    passes: int | None = None  # of the target that gave tokens; None where the system does not tell


class Driver(Protocol):
    """One system. Made with nothing loaded."""

    def load(self, load: Load) -> str: ...  # the system's version
    def generate(self, ask: Ask) -> Answer: ...
    def peak_mb(self) -> float: ...


class Probe(Driver, Protocol):
    """A system whose passes can be reached one by one."""

    def time_pass(self, context: int, rows: int) -> float: ...  # seconds for `rows` tokens after `context`
    def logits(self, tokens: list[int], file: str) -> int: ...  # a float32 row for each token, as .npy


class Clock:
    """Notes when the first and the last token came."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = 0.0

    def tick(self) -> None:
        self._last = time.perf_counter() - self._started
        self._first = self._last if self._first is None else self._first

    def answer(self, tokens: Sequence[int], passes: int | None) -> Answer:
        return Answer([int(t) for t in tokens], self._first or self._last, self._last, passes)


def some_tokens(start: int, count: int) -> list[int]:
    """Ids that every vocabulary has, for passes whose cost does not depend on what they say."""
    return [10 + (start + i) * 7919 % 30000 for i in range(count)]


def peak_mb(pid: int | str = "self") -> float:
    """Most memory a process ever held; a maximum that an exec inherits would be its parent's."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / PAGE_KB
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / PAGE_KB


def serve(make: Callable[[], Driver]) -> None:
    """Answers until the requests end. Whatever a library prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver: Driver | None = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "load":
                driver = make()
                _load(driver, Load(**request), out)
            elif driver is None:
                raise RuntimeError("nothing is loaded")
            elif do == "generate":
                _say(out, asdict(driver.generate(Ask(**request))))
            elif do == "pass":
                _say(out, {"seconds": cast(Probe, driver).time_pass(**request)})
            elif do == "logits":
                _say(out, {"rows": cast(Probe, driver).logits(**request)})
            else:
                _say(out, {"peak_mb": round(driver.peak_mb(), 1)})
        except Exception as problem:
            traceback.print_exc()
            _say(out, {"error": f"{type(problem).__name__}: {problem}"})


def _load(driver: Driver, load: Load, out: TextIO) -> None:
    started = time.perf_counter()
    version = driver.load(load)
    _say(out, {"version": version, "seconds": round(time.perf_counter() - started, 2)})


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
