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


def test_what_is_done_while_idle_ends_when_it_says_so() -> None:
    calls: list[str] = []
    ended = threading.Event()

    def work() -> bool:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            ended.set()
        return len(calls) < 3

    worker = EngineThread(Idle())
    worker.while_idle(work)
    worker.start()
    assert ended.wait(60)
    assert answered(worker, seq()) is None
    worker.stop(60)
    assert calls == ["paceline-engine"] * 3


def test_requests_go_before_what_is_done_while_idle() -> None:
    class Busy(Idle):
        """Busy for three passes with each request."""

        passes = 0

        @property
        def busy(self) -> bool:  # type: ignore[override]
            return self.passes > 0

        def submit(self, seq: Seq, slots: int = 1) -> None:
            order.append("request")
            self.passes = 3

        def step(self) -> list[Round]:
            order.append("pass")
            self.passes -= 1
            return []

    order: list[str] = []
    ended = threading.Event()

    def work() -> bool:
        order.append("work")
        if order.count("work") == 1:  # comes while it runs
            worker.submit(seq(), lambda _: None, lambda _: None)
            return True
        ended.set()
        return False

    worker = EngineThread(Busy())
    worker.while_idle(work)
    worker.start()
    assert ended.wait(60)
    worker.stop(60)
    assert order == ["work", "request", "pass", "pass", "pass", "work"]


def test_a_failure_of_what_is_done_while_idle_ends_only_that(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> bool:
        raise RuntimeError("broken")

    worker = EngineThread(Idle())
    worker.while_idle(work)
    worker.start()
    assert answered(worker, seq()) is None
    assert answered(worker, seq()) is None
    assert sum("there are no requests failed" in line for line in caplog.messages) == 1
    worker.stop(60)
