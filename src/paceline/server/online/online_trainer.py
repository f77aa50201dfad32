"""Trained drafters go on learning from what the server serves, while it has nothing else to do.

A request costs no more than a note of its tokens and of where guesses went wrong. All work is that of another
process, which is stopped for as long as anybody waits for an answer.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol

from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.heads.versions import take_over
from paceline.llm import LLM
from paceline.loading import TrainedHead, head_drafters, read_heads
from paceline.log import log_problem
from paceline.server.online.memory_estimate import reason_against
from paceline.server.online.process import TrainerProcess
from paceline.server.online.version_watcher import VersionWatcher
from paceline.server.telemetry.metrics import Metrics
from paceline.trace.online import MIN_ANSWER_TOKENS, OnlineTrainingConfig, RefreshJob, TrainingSample

LOOK_S: Final = 0.1  # between two looks at whether anybody waits

log = logging.getLogger("paceline.server")


class EngineQueue(Protocol):
    """The part of the engine's thread that a trainer uses."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def between_passes(self, call: Callable[[], None]) -> None: ...


class Kept:
    """The latest texts; the oldest go."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._texts: deque[TrainingSample] = deque()
        self._tokens = 0
        self._new = 0
        self._lock = threading.Lock()

    def add(self, text: TrainingSample) -> None:
        with self._lock:
            self._texts.append(text)
            self._tokens += len(text.tokens)
            self._new += 1
            while self._tokens > self._most:
                self._tokens -= len(self._texts.popleft().tokens)

    @property
    def new(self) -> int:
        """How many came since they were last taken."""
        return self._new

    def take(self) -> tuple[TrainingSample, ...]:
        """All of them, oldest first; they stay."""
        with self._lock:
            self._new = 0
            return tuple(self._texts)


class OnlineTrainer:
    """Keeps texts, begins and pauses the process, and puts a new version in the place of the old."""

    def __init__(
        self,
        llm: LLM,
        thread: EngineQueue,
        found: Sequence[TrainedHead],
        model: Path,
        metrics: Metrics,
        engine: EngineConfig,
        config: OnlineTrainingConfig,
        clock: Callable[[], float] = monotonic,
        begin: Callable[[bytes], TrainerProcess] = TrainerProcess,
        against: Callable[[Path, Sequence[Path], OnlineTrainingConfig], str] = reason_against,
    ) -> None:
        self._llm, self._engine_queue, self._model, self._metrics = llm, thread, model, metrics
        self._engine, self._config, self._clock, self._begin = engine, config, clock, begin
        self._reason_against, self._warned = against, False
        self._following = VersionWatcher(found, self._serve, config.patience_s, clock)
        self._kept = Kept(config.buffer_tokens)
        self._pupil: TrainerProcess | None = None
        self._busy_at = clock()
        self._lock = threading.Lock()  # guards the two above
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-learning", daemon=True)

    @property
    def pupil(self) -> TrainerProcess | None:
        return self._pupil

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        with self._lock:
            if self._pupil is not None:
                for told in self._pupil.told():  # a version that was made is not lost
                    self._note(told)
                self._pupil.kill()
                self._pupil = None

    def arrived(self) -> None:
        """A request: whoever learns stops now."""
        with self._lock:
            self._busy_at = self._clock()
            if self._pupil is not None:
                self._pupil.pause()

    def keep(self, text: TrainingSample) -> None:
        text = text.truncate(self._config.max_len)
        if text.answer_len < MIN_ANSWER_TOKENS:
            return
        self._kept.add(text)
        self._metrics.learn_text()

    def _run(self) -> None:
        self._try(self._may_begin)  # whoever starts a server with too little memory hears of it at once
        while not self._ended.wait(LOOK_S):
            self._try(self.look)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as problem:
            log_problem(log, "learning failed; requests are served as before", problem)

    def look(self) -> None:
        """Pauses or goes on, begins, and sees what came of it."""
        if self._engine_queue.running or self._engine_queue.waiting:
            self.arrived()
        idle = self._go_on()
        self._following.look(idle)
        if not idle:
            return
        if self._pupil is not None:
            self._hear(self._pupil)
        elif self._kept.new >= self._config.min_new_samples:
            self._learn()

    def _go_on(self) -> bool:
        """Whether nobody has waited for a while."""
        with self._lock:
            if self._clock() - self._busy_at < self._config.idle_s:
                return False
            if self._pupil is not None:
                self._pupil.go_on()
            return True

    def _may_begin(self) -> bool:
        """Whether there is memory for it. If not, that is told once, until there is."""
        against = self._reason_against(self._model, list(self._following.roots.values()), self._config)
        if against and not self._warned:
            log.warning("%s", against)
        self._warned = bool(against)
        return not against

    def _learn(self) -> None:
        texts = self._kept.take()
        if not self._may_begin():
            return
        folders = tuple(map(str, self._following.roots.values()))
        job = RefreshJob(str(self._model), folders, self._engine, texts, self._config)
        log.info("%d texts are there to learn from", len(texts))
        pupil = self._begin(job.encode())
        with self._lock:
            self._pupil = pupil
            if self._clock() - self._busy_at < self._config.idle_s:
                pupil.pause()

    def _hear(self, pupil: TrainerProcess) -> None:
        code = pupil.exit_code
        for told in pupil.told():
            self._note(told)
        if code is None:
            return
        if code:
            log.error("learning ended with %d; every version and text is as it was", code)
            self._metrics.learn_outcome("failed")
        with self._lock:
            pupil.kill()
            self._pupil = None

    def _note(self, told: dict[str, Any]) -> None:
        if "steps" in told:
            self._metrics.learn_steps(told["steps"])
        if "waits" in told:
            log.info("too little to learn from so far: %s", told["waits"])
        if "failed" in told:
            log.error("learning failed: %s", told["failed"])
        if "made" in told and (against := self._against(told)):
            del told["made"]
            told["refused"] = against
        for outcome in ("made", "refused"):
            if outcome in told:
                self._metrics.learn_outcome(outcome)
                log.info(
                    "%s: %s %s; tokens per pass on held-out conversations: %.3f before, %.3f after",
                    told["drafter"],
                    "version" if outcome == "made" else "no new version, for",
                    told[outcome],
                    told["before"],
                    told["after"],
                )

    def _against(self, told: dict[str, Any]) -> str:
        """Has what was made serve from now on; why not, where that cannot be."""
        root = self._following.roots[told["kind"]]
        try:
            if take_over(root, told["made"], told["learned_from"], self._config.max_versions):
                return ""
        except PacelineError as error:
            return str(error)
        except OSError as error:
            return f"it cannot be written: {error.strerror}"
        return "another version serves by now"

    def _serve(self, one: TrainedHead) -> None:
        heads = read_heads([one], self._model)
        (drafter,) = head_drafters(self._llm.target, heads, self._engine)

        def exchange() -> None:
            self._llm.replace_drafter(drafter)
            self._metrics.drafter_version(one.kind, one.version.number)
            log.info("%s guesses with version %d now", one.name, one.version.number)

        self._engine_queue.between_passes(exchange)
