"""The engine in a thread of its own: one thread runs it, everybody else talks to it through a queue.

As vLLM's v1/engine/async_llm.py. `submit` is for coroutines.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from paceline.errors import PacelineError, ShuttingDown
from paceline.log import log_error
from paceline.types import Round, Seq

log = logging.getLogger("paceline")

Deliver = Callable[[Round], None]  # called in the engine's thread; must not block


class Engine(Protocol):
    """The part of an engine that its thread uses."""

    @property
    def busy(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def idle_s(self) -> float: ...
    def submit(self, seq: Seq, slots: int = 1) -> None: ...
    def cancel(self, seq_id: str) -> None: ...
    def step(self) -> list[Round]: ...
    def give_up(self, error: PacelineError) -> list[Round]: ...


@dataclass(frozen=True, slots=True)
class _Submit:
    seq: Seq
    deliver: Deliver
    answer: Callable[[PacelineError | None], None]  # called once: why it was refused, or None
    slots: int


@dataclass(frozen=True, slots=True)
class _Cancel:
    seq_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    call: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class PassTurns:
    """Passes of several models, one at a time, in the order they are asked for: each has all the cores.

    Threads of two passes at once would take the cores from one another in the middle of their products.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._ended = 0

    def __enter__(self) -> None:
        with self._changed:
            turn = self._asked
            self._asked += 1
            self._changed.wait_for(lambda: self._ended == turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


class EngineThread:
    """Runs passes while there is work, and sleeps while there is none."""

    def __init__(
        self,
        engine: Engine,
        turns: AbstractContextManager[None] | None = None,
        closed: Callable[[], PacelineError] = ShuttingDown,
    ) -> None:
        """turns: held during each pass; None: no other model runs any.

        closed: the error of requests that come, or still run, once the thread is stopped.
        """
        self._engine = engine
        self._turns = turns or nullcontext()
        self._closed = closed
        self._inbox: SimpleQueue[_Submit | _Cancel | _Call | _Stop] = SimpleQueue()
        self._delivers: dict[str, Deliver] = {}
        self._ended = False
        self._spare_work: Callable[[], bool] | None = None
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

    def submit(
        self, seq: Seq, deliver: Deliver, answer: Callable[[PacelineError | None], None], slots: int = 1
    ) -> None:
        """`answer` is called once with the engine's refusal or None; then `deliver` gets every round."""
        self._inbox.put(_Submit(seq, deliver, answer, slots))
        if self._ended:  # the thread may have read its inbox for the last time before this
            self._refuse_all()

    def cancel(self, seq_id: str) -> None:
        self._inbox.put(_Cancel(seq_id))

    def between_passes(self, call: Callable[[], None]) -> None:
        """Runs a call in the engine's thread; it must be quick."""
        self._inbox.put(_Call(call))

    def while_idle(self, call: Callable[[], bool]) -> None:
        """Before the start: a call to be repeated until it gives False, while there is nothing else to do.

        A request that comes meanwhile waits for one such call.
        """
        self._spare_work = call

    def stop(self, timeout: float | None) -> None:
        """Ends the thread; requests that still run end with an error. timeout: seconds; None: any number."""
        self._inbox.put(_Stop())
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            while not self._engine.busy or not self._inbox.empty():
                if self._spare_work is not None and self._inbox.empty():
                    self._work_idly(self._spare_work)
                elif not self._take(self._inbox.get()):
                    return
            if (idle_s := self._engine.idle_s) > 0:  # any message ends the wait
                with suppress(Empty):
                    if not self._take(self._inbox.get(timeout=idle_s)):
                        return
                continue
            try:
                with self._turns:
                    rounds = self._engine.step()
            except Exception as problem:
                log_error(log, "a pass failed; the requests in it end", problem)
                rounds = self._engine.give_up(PacelineError(f"internal error: {type(problem).__name__}"))
            self._deliver_rounds(rounds)

    def _take(self, message: _Submit | _Cancel | _Call | _Stop) -> bool:
        if isinstance(message, _Stop):
            self._deliver_rounds(self._engine.give_up(self._closed()))
            self._ended = True
            self._refuse_all()
            return False
        if isinstance(message, _Cancel):
            self._delivers.pop(message.seq_id, None)
            self._engine.cancel(message.seq_id)
        elif isinstance(message, _Call):
            self._call(message.call)
        else:
            self._admit(message)
        return True

    def _admit(self, message: _Submit) -> None:
        try:
            self._engine.submit(message.seq, message.slots)
        except PacelineError as error:
            message.answer(error)
        except Exception as problem:
            log_error(log, "a request could not be admitted", problem)
            message.answer(PacelineError(f"internal error: {type(problem).__name__}"))
        else:
            self._delivers[message.seq.id] = message.deliver
            message.answer(None)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as problem:
            log_error(log, "a change between passes failed", problem)

    def _work_idly(self, call: Callable[[], bool]) -> None:
        more = False
        try:
            with self._turns:
                more = call()
        except Exception as problem:
            log_error(log, "what is done while there are no requests failed, and ends", problem)
        if not more:
            self._spare_work = None

    def _refuse_all(self) -> None:
        """Nobody waits forever for a thread that has ended."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, _Submit):
                message.answer(self._closed())

    def _deliver_rounds(self, rounds: list[Round]) -> None:
        for r in rounds:
            deliver = self._delivers.get(r.request)
            if r.finish is not None:
                self._delivers.pop(r.request, None)
            if deliver is not None:
                deliver(r)


async def submit(thread: EngineThread, seq: Seq, deliver: Deliver, slots: int = 1) -> None:
    """Hands a sequence over and waits for its admission. `deliver` gets every round, in the event loop.

    Raises the engine's refusal. Who is cancelled meanwhile has to cancel the sequence.
    """
    loop = asyncio.get_running_loop()
    admitted: asyncio.Future[None] = loop.create_future()

    def settle(error: PacelineError | None) -> None:
        if admitted.done():  # cancelled
            return
        if error is None:
            admitted.set_result(None)
        else:
            admitted.set_exception(error)

    thread.submit(
        seq,
        lambda r: _call_soon(loop, lambda: deliver(r)),
        lambda error: _call_soon(loop, lambda: settle(error)),
        slots,
    )
    await admitted


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From the engine's thread; a loop that is closed has nobody left to call."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
