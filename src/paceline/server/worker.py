"""One thread runs the engine; everyone else talks to it through a queue."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from paceline.errors import PacelineError, ShuttingDown
from paceline.log import log_problem
from paceline.types import Round, Seq

log = logging.getLogger("paceline.server")

Deliver = Callable[[Round], None]  # called in the worker's thread; must not block


class Engine(Protocol):
    """What the worker needs of an engine."""

    @property
    def busy(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def submit(self, seq: Seq) -> None: ...
    def cancel(self, seq_id: str) -> None: ...
    def step(self) -> list[Round]: ...
    def give_up(self, error: PacelineError) -> list[Round]: ...


@dataclass(frozen=True, slots=True)
class _Submit:
    seq: Seq
    deliver: Deliver
    answer: Callable[[PacelineError | None], None]  # whether it was let in


@dataclass(frozen=True, slots=True)
class _Cancel:
    seq_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    call: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineThread:
    """Runs passes while there is work, and sleeps while there is none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[_Submit | _Cancel | _Call | _Stop] = SimpleQueue()
        self._deliver: dict[str, Deliver] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return self._engine.running

    @property
    def waiting(self) -> int:
        return self._engine.waiting + self._inbox.qsize()

    def submit(self, seq: Seq, deliver: Deliver, answer: Callable[[PacelineError | None], None]) -> None:
        """`answer` is told once whether the engine took it; then `deliver` gets every round."""
        self._inbox.put(_Submit(seq, deliver, answer))
        if self._ended:  # the thread may have looked for the last time before this came
            self._refuse_rest()

    def cancel(self, seq_id: str) -> None:
        self._inbox.put(_Cancel(seq_id))

    def between_passes(self, call: Callable[[], None]) -> None:
        """Has it done in the worker's thread; it must be quick."""
        self._inbox.put(_Call(call))

    def stop(self, timeout: float) -> None:
        """Ends the thread; what still runs ends with an error."""
        self._inbox.put(_Stop())
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            while not self._engine.busy or not self._inbox.empty():
                if not self._take(self._inbox.get()):
                    return
            try:
                rounds = self._engine.step()
            except Exception as problem:
                log_problem(log, "a pass failed; the requests in it end", problem)
                rounds = self._engine.give_up(PacelineError(f"internal error: {type(problem).__name__}"))
            self._pass_on(rounds)

    def _take(self, message: _Submit | _Cancel | _Call | _Stop) -> bool:
        if isinstance(message, _Stop):
            self._pass_on(self._engine.give_up(ShuttingDown()))
            self._ended = True
            self._refuse_rest()
            return False
        if isinstance(message, _Cancel):
            self._deliver.pop(message.seq_id, None)
            self._engine.cancel(message.seq_id)
        elif isinstance(message, _Call):
            self._do(message.call)
        else:
            self._let_in(message)
        return True

    def _let_in(self, message: _Submit) -> None:
        try:
            self._engine.submit(message.seq)
        except PacelineError as error:
            message.answer(error)
        except Exception as problem:
            log_problem(log, "a request could not be let in", problem)
            message.answer(PacelineError(f"internal error: {type(problem).__name__}"))
        else:
            self._deliver[message.seq.id] = message.deliver
            message.answer(None)

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as problem:
            log_problem(log, "a change between passes failed", problem)

    def _refuse_rest(self) -> None:
        """Nobody waits forever for a thread that has ended."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, _Submit):
                message.answer(ShuttingDown())

    def _pass_on(self, rounds: list[Round]) -> None:
        for r in rounds:
            deliver = self._deliver.get(r.request)
            if r.finish is not None:
                self._deliver.pop(r.request, None)
            if deliver is not None:
                deliver(r)
