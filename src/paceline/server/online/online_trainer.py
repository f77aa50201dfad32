"""Online training: trains drafters further on the server's own traffic, while it is idle.

A request costs no more than a note of its tokens and of its rejected drafts. Another process does the work,
and is paused for as long as anybody waits for an answer.
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
from paceline.log import log_error
from paceline.server.online.process import TrainerProcess, memory_shortage
from paceline.server.online.version_watcher import VersionWatcher
from paceline.server.telemetry.metrics import Metrics
from paceline.trace.online import MIN_ANSWER_TOKENS, OnlineTrainingConfig, RefreshJob, TrainingSample

POLL_S: Final = 0.1  # how often it checks that nobody waits

log = logging.getLogger("paceline.server")


class EngineQueue(Protocol):
    """The part of the engine's thread that a trainer uses."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def between_passes(self, call: Callable[[], None]) -> None: ...


class SampleBuffer:
    """The latest samples; the oldest are dropped."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._samples: deque[TrainingSample] = deque()
        self._tokens = 0
        self._new = 0
        self._lock = threading.Lock()

    def add(self, sample: TrainingSample) -> None:
        with self._lock:
            self._samples.append(sample)
            self._tokens += len(sample.tokens)
            self._new += 1
            while self._tokens > self._max_tokens:
                self._tokens -= len(self._samples.popleft().tokens)

    @property
    def new(self) -> int:
        """The number of samples since the last `take`."""
        return self._new

    def take(self) -> tuple[TrainingSample, ...]:
        """All samples, oldest first; they stay in the buffer."""
        with self._lock:
            self._new = 0
            return tuple(self._samples)


class OnlineTrainer:
    """Buffers samples, starts and pauses the trainer process, and loads the versions that it makes."""

    def __init__(
        self,
        llm: LLM,
        thread: EngineQueue,
        heads: Sequence[TrainedHead],
        model: Path,
        metrics: Metrics,
        engine: EngineConfig,
        config: OnlineTrainingConfig,
        clock: Callable[[], float] = monotonic,
        start_process: Callable[[bytes], TrainerProcess] = TrainerProcess,
        memory_shortage: Callable[[Path, Sequence[Path], OnlineTrainingConfig], str] = memory_shortage,
    ) -> None:
        self._llm, self._engine_queue, self._model, self._metrics = llm, thread, model, metrics
        self._engine, self._config, self._clock, self._begin = engine, config, clock, start_process
        self._memory_shortage, self._warned = memory_shortage, False
        self._watcher = VersionWatcher(heads, self._load, config.patience_s, clock)
        self._buffer = SampleBuffer(config.buffer_tokens)
        self._process: TrainerProcess | None = None
        self._busy_at = clock()
        self._lock = threading.Lock()  # guards the two above
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-training", daemon=True)

    @property
    def process(self) -> TrainerProcess | None:
        return self._process

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        with self._lock:
            if self._process is not None:
                for message in self._process.messages():  # a version that was made is not lost
                    self._handle(message)
                self._process.kill()
                self._process = None

    def request_arrived(self) -> None:
        """Pauses training at once."""
        with self._lock:
            self._busy_at = self._clock()
            if self._process is not None:
                self._process.pause()

    def add_sample(self, sample: TrainingSample) -> None:
        sample = sample.truncate(self._config.max_len)
        if sample.answer_len < MIN_ANSWER_TOKENS:
            return
        self._buffer.add(sample)
        self._metrics.training_sample()

    def _run(self) -> None:
        self._try(self._has_memory)  # too little memory is logged when the server starts
        while not self._ended.wait(POLL_S):
            self._try(self.poll)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as problem:
            log_error(log, "online training failed; requests are served as before", problem)

    def poll(self) -> None:
        """Pauses or resumes the process, starts one, and handles its messages."""
        if self._engine_queue.running or self._engine_queue.waiting:
            self.request_arrived()
        idle = self._resume_if_idle()
        self._watcher.poll(idle)
        if not idle:
            return
        if self._process is not None:
            self._read_messages(self._process)
        elif self._buffer.new >= self._config.min_new_samples:
            self._start_training()

    def _resume_if_idle(self) -> bool:
        """True if no request has run for a while."""
        with self._lock:
            if self._clock() - self._busy_at < self._config.idle_s:
                return False
            if self._process is not None:
                self._process.resume()
            return True

    def _has_memory(self) -> bool:
        """Logs a shortage once, until there is memory again."""
        shortage = self._memory_shortage(self._model, list(self._watcher.roots.values()), self._config)
        if shortage and not self._warned:
            log.warning("%s", shortage)
        self._warned = bool(shortage)
        return not shortage

    def _start_training(self) -> None:
        samples = self._buffer.take()
        if not self._has_memory():
            return
        folders = tuple(map(str, self._watcher.roots.values()))
        job = RefreshJob(str(self._model), folders, self._engine, samples, self._config)
        log.info("online training on %d samples", len(samples))
        process = self._begin(job.encode())
        with self._lock:
            self._process = process
            if self._clock() - self._busy_at < self._config.idle_s:
                process.pause()

    def _read_messages(self, process: TrainerProcess) -> None:
        code = process.exit_code
        for message in process.messages():
            self._handle(message)
        if code is None:
            return
        if code:
            log.error("the training process exited with %d; nothing was changed", code)
            self._metrics.training_outcome("failed")
        with self._lock:
            process.kill()
            self._process = None

    def _handle(self, message: dict[str, Any]) -> None:
        if "steps" in message:
            self._metrics.training_steps(message["steps"])
        if "waits" in message:
            log.info("online training waits for more samples: %s", message["waits"])
        if "failed" in message:
            log.error("online training failed: %s", message["failed"])
        if "made" in message and (refusal := self._take_over(message)):
            del message["made"]
            message["refused"] = refusal
        for outcome in ("made", "refused"):
            if outcome in message:
                self._metrics.training_outcome(outcome)
                log.info(
                    "%s: %s %s; tokens per pass on held-out conversations: %.3f before, %.3f after",
                    message["drafter"],
                    "version" if outcome == "made" else "no new version, for",
                    message[outcome],
                    message["before"],
                    message["after"],
                )

    def _take_over(self, message: dict[str, Any]) -> str:
        """Makes a new version the current one; returns why it cannot be."""
        root = self._watcher.roots[message["kind"]]
        try:
            if take_over(root, message["made"], message["learned_from"], self._config.max_versions):
                return ""
        except PacelineError as error:
            return str(error)
        except OSError as error:
            return f"it cannot be written: {error.strerror}"
        return "another version serves by now"

    def _load(self, head: TrainedHead) -> None:
        heads = read_heads([head], self._model)
        (drafter,) = head_drafters(self._llm.target, heads, self._engine)

        def replace() -> None:
            self._llm.replace_drafter(drafter)
            self._metrics.drafter_version(head.kind, head.version.number)
            log.info("%s drafts with version %d now", head.name, head.version.number)

        self._engine_queue.between_passes(replace)
