"""The engine's thread when it is asked to end: everybody who waits hears of it."""

import asyncio
import threading

import pytest

from paceline.engine.engine_thread import EngineThread, submit
from paceline.errors import PacelineError, ShuttingDown
from paceline.types import Round, Seq


class Idle:
    """An engine that takes everything and does nothing."""

    busy = False
    running = waiting = 0
    idle_s = 0.0

    def __init__(self) -> None:
        self.taken: list[Seq] = []

    def submit(self, seq: Seq, slots: int = 1) -> None:
        self.taken.append(seq)

    def cancel(self, seq_id: str) -> None: ...

    def step(self) -> list[Round]:
        return []

    def give_up(self, error: PacelineError) -> list[Round]:
        return []


def seq() -> Seq:
    return Seq("a", [1], 1)


def answered(worker: EngineThread, asked: Seq) -> PacelineError | None:
    heard = threading.Event()
    answers: list[PacelineError | None] = []

    def answer(error: PacelineError | None) -> None:
        answers.append(error)
        heard.set()

    worker.submit(asked, lambda _: None, answer)
    assert heard.wait(60), "nobody answered"
    return answers[0]


@pytest.fixture
def worker() -> EngineThread:
    made = EngineThread(Idle())
    made.start()
    return made


def test_what_comes_after_the_end_is_refused(worker: EngineThread) -> None:
    assert answered(worker, seq()) is None
    worker.stop(5)
    assert not worker.alive
    assert isinstance(answered(worker, seq()), ShuttingDown)


class Closing(asyncio.SelectorEventLoop):
    """A loop that is closed just after it was asked whether it is."""

    tells = False

    def is_closed(self) -> bool:
        return self.tells and super().is_closed()


def test_a_loop_that_closes_meanwhile_does_not_end_the_thread(worker: EngineThread) -> None:
    loop, held, go_on = Closing(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(60)

    worker.between_passes(hold)
    assert held.wait(60)
    waits = loop.create_task(submit(worker, seq(), lambda _: None))
    loop.call_soon(loop.stop)
    loop.run_forever()
    waits.cancel()
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    go_on.set()
    assert answered(worker, seq()) is None
    assert worker.alive
    worker.stop(60)
    loop.tells = True
