"""The server saves the controller's estimates at intervals and when it stops, and begins with them."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import httpx
import pytest

from paceline.engine.control import Rate
from paceline.engine.estimates import Estimates
from paceline.engine.saved_estimates import SavedEstimates
from paceline.server.estimates_saver import EstimatesSaver
from paceline.types import Drafter
from support.servers import Running, toy_running, until


class Engine:
    """Runs calls in a thread of its own, as the engine's does."""

    alive = True

    def __init__(self) -> None:
        self.calls = 0

    def between_passes(self, call: Callable[[], None]) -> None:
        self.calls += 1
        Thread(target=call).start()


def saved_to(path: Path) -> tuple[SavedEstimates, Rate]:
    rate, drafters = Rate(), dict[str, Drafter]()
    return SavedEstimates(path, rate.estimates, drafters), rate


def test_saves_at_intervals_what_has_changed(tmp_path: Path) -> None:
    path, engine = tmp_path / "new" / "e.json", Engine()
    saved, rate = saved_to(path)
    saver = EstimatesSaver(saved, engine, interval_s=0.01)
    saver.start()
    try:
        assert until(path.exists, 60)
        written, calls = path.stat().st_mtime_ns, engine.calls
        assert until(lambda: engine.calls > calls + 3, 60)
        assert path.stat().st_mtime_ns == written  # nothing was learned meanwhile
        rate.estimates.own_us = 7.0
        assert until(lambda: "7.0" in path.read_text(), 60)
    finally:
        saver.close(60)


def test_saves_at_the_end_unless_the_engine_still_runs(tmp_path: Path) -> None:
    path, engine = tmp_path / "e.json", Engine()
    EstimatesSaver(saved_to(path)[0], engine).close(60)
    assert not path.exists()
    engine.alive = False
    EstimatesSaver(saved_to(path)[0], engine).close(60)
    assert path.exists()


def test_a_disk_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    engine = Engine()
    engine.alive = False
    with caplog.at_level(logging.ERROR, "paceline.server"):
        EstimatesSaver(saved_to(tmp_path / "file" / "e.json")[0], engine).close(60)
    assert "could not be saved" in caplog.text


def ask(server: Running) -> None:
    body = {"prompt": "a b c a b c a b c a b", "max_tokens": 40, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_a_server_begins_with_the_estimates_of_the_last_one(tmp_path: Path) -> None:
    def learned(server: Running) -> Estimates:
        controller = server.app.engine.llm.engine.controller
        assert isinstance(controller, Rate)
        return controller.estimates

    with toy_running(tmp_path, save_estimates=True) as server:
        assert not learned(server).draft_us
        ask(server)
    assert server.app.engine.llm.saved_estimates.path.is_relative_to(tmp_path)
    before = learned(server)
    assert before.draft_us
    with toy_running(tmp_path, save_estimates=True) as server:
        after = learned(server)
        assert {key: one.state() for key, one in after.gains.items()} == {
            key: pytest.approx(one.state()) for key, one in before.gains.items()
        }
        assert {name: one.state() for name, one in after.draft_us.items()} == {
            name: one.state() for name, one in before.draft_us.items()
        }
    with toy_running(tmp_path) as server:
        assert not learned(server).draft_us
