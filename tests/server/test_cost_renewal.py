"""A table of a busy machine is measured again while nothing runs, until the machine is quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.llm import LLM
from paceline.server.cost_renewal import CostRenewal
from paceline.target import cost
from paceline.target.cost import CostTable
from support.servers import toy_chat_model, until

PATIENCE = 60


class Engine:
    """Calls at once, in the thread of whoever asks."""

    def __init__(self) -> None:
        self.running = self.waiting = self.calls = 0
        self.held = False

    @property
    @contextmanager
    def turns(self) -> Iterator[None]:
        self.held = True
        yield
        self.held = False

    def between_passes(self, call: Callable[[], None]) -> None:
        self.calls += 1
        call()


def renewal(answers: list[bool], engine: Engine) -> tuple[CostRenewal, list[bool]]:
    tried: list[bool] = []

    def renew() -> bool:
        tried.append(engine.held)
        return answers.pop(0)

    return CostRenewal(renew, engine, interval_s=0.001), tried


def test_it_is_tried_until_the_machine_was_quiet_with_no_other_pass_beside_it() -> None:
    engine = Engine()
    made, tried = renewal([False, False, True], engine)
    made.start()
    made._thread.join(PATIENCE)
    assert not made._thread.is_alive()
    assert tried == [True] * 3
    made.close(PATIENCE)


@pytest.mark.parametrize("busy", ["running", "waiting"])
def test_nothing_is_measured_while_requests_run_or_wait(busy: str) -> None:
    engine = Engine()
    setattr(engine, busy, 1)
    made, tried = renewal([True], engine)
    made.start()
    assert until(lambda: engine.calls > 3, PATIENCE)
    assert not tried
    setattr(engine, busy, 0)
    made._thread.join(PATIENCE)
    assert tried == [True]


def test_it_ends_with_the_server_and_after_an_error() -> None:
    engine = Engine()
    never = CostRenewal(lambda: pytest.fail("measured"), engine)
    never.start()
    never.close(PATIENCE)
    assert not never._thread.is_alive()
    broken, _ = renewal([], engine)  # raises IndexError
    broken.start()
    broken._thread.join(PATIENCE)
    assert not broken._thread.is_alive()


def test_the_controller_and_the_monitor_use_the_new_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    slow = CostTable({256: {1: 900.0, 16: 9000.0}}, others=0.5)
    monkeypatch.setattr(cost, "measure", lambda *_: slow)
    llm = LLM(str(toy_chat_model(tmp_path)), config=EngineConfig("cpu", cache_mb=64))
    assert not llm.renew_cost()
    assert llm.cost is slow
    quick = CostTable({256: {1: 2.0, 16: 5.0}})
    monkeypatch.setattr(cost, "measure", lambda *_: quick)
    assert llm.renew_cost()
    assert llm.cost is quick
    assert llm._controller.cost(16, 256) == pytest.approx(5000)
    assert llm.engine._scheduler._row_time._row_cost(256) == pytest.approx(0.2)  # type: ignore[misc]
    assert llm._cost_monitor._table is quick
