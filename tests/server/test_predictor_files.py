"""Predictors outlive the server: the same predictions, for their tenant alone, whatever is in the folder."""

import asyncio
import json
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.server.tool_prediction import PredictionRequest, PredictorFiles, ToolPredictions
from paceline.server.tool_prediction import predictor_files as module
from paceline.server.tool_prediction.predictor_files import FOLDER, clear
from support.agent_runs import FUNCTIONS, SAFE, Shop

TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS.values()]


def started(folder: Path, model: str = "m", **options: Any) -> ToolPredictions:
    return ToolPredictions(PredictorFiles(folder, model), **options)


def wanted(messages: list[Any]) -> PredictionRequest:
    return PredictionRequest.of(messages, TOOLS, "auto", list(SAFE), 0.3, 4)


def teach(predictions: ToolPredictions, tenant: str, remember: bool = True, runs: int = 5) -> None:
    async def answer() -> None:
        shop = Shop(random.Random(0))
        for _ in range(runs):
            for messages, calls in shop.run():
                made = await predictions.predict(wanted(messages), tenant, remember)
                made.settle([(name, json.dumps(arguments)) for name, arguments in calls])

    asyncio.run(answer())


def predicted(predictions: ToolPredictions, tenant: str) -> list[Any]:
    async def all_of_a_run() -> list[Any]:
        run = Shop(random.Random(9)).run()
        return [(await predictions.predict(wanted(messages), tenant, False)).calls for messages, _ in run]

    return asyncio.run(all_of_a_run())


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*"))


def test_a_restart_predicts_as_before(tmp_path: Path) -> None:
    first = started(tmp_path)
    teach(first, "anna")
    expected = predicted(first, "anna")
    first.close(60)
    assert any(expected)
    assert predicted(started(tmp_path), "anna") == expected
    assert not any(predicted(started(tmp_path), "berta"))
    assert not any(predicted(started(tmp_path, "another model"), "anna"))
    assert not any(predicted(ToolPredictions(), "anna"))


def test_after_its_end_nothing_is_predicted_and_nothing_fails(tmp_path: Path) -> None:
    first = started(tmp_path)
    teach(first, "anna")
    first.close(60)
    before = [path.read_bytes() for path in files(tmp_path)]
    teach(first, "anna", runs=1)
    assert not any(predicted(first, "anna"))
    assert [path.read_bytes() for path in files(tmp_path)] == before


def test_what_is_not_remembered_is_not_written_and_files_are_for_their_owner(tmp_path: Path) -> None:
    first = started(tmp_path)
    teach(first, "anna", remember=False)
    predicted(first, "berta")
    first.close(60)
    assert files(tmp_path) == []
    second = started(tmp_path)
    teach(second, "anna", runs=1)
    second.close(60)
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "anna" not in path.name + path.read_text()


def test_a_server_that_is_killed_has_written_before(tmp_path: Path) -> None:
    first = started(tmp_path, save_s=0)
    teach(first, "anna")
    assert any(predicted(started(tmp_path), "anna"))


def test_a_tenant_that_leaves_the_memory_is_written(tmp_path: Path) -> None:
    first = started(tmp_path, max_tenants=1)
    teach(first, "anna")
    predicted(first, "berta")
    assert any(predicted(first, "anna"))


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_text(path.read_text()[:-40]),
    "empty": lambda path: path.write_text(""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "a list": lambda path: path.write_text("[]"),
    "too large": lambda path: path.write_bytes(b" " * ((4 << 20) + 1)),
    "nested": lambda path: path.write_text("[" * 100_000),
    "version": edited(lambda state: state.update(version=0)),
    "weights": edited(lambda state: state["models"][0].__setitem__(0, "eJwDAAAAAAE=")),
    "fewer models": edited(lambda state: state["models"].pop()),
    "tools": edited(lambda state: state.update(tools=[1])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_forgotten_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = started(tmp_path)
    teach(first, "anna", runs=2)
    first.close(60)
    (path,) = files(tmp_path)
    DAMAGES[damage](path)
    second = started(tmp_path)
    assert not any(predicted(second, "anna"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not path.exists()
    teach(second, "anna")
    second.close(60)
    assert any(predicted(started(tmp_path), "anna"))


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    first = started(tmp_path / "file")
    teach(first, "anna")
    assert any(predicted(first, "anna"))
    first.close(60)
    assert "could not be saved" in caplog.text


def test_files_are_bounded_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 3)
    first = started(tmp_path)
    for tenant in "abcde":
        teach(first, tenant, runs=1)
    first.close(60)
    assert len(files(tmp_path)) == 3
    assert clear(tmp_path) == 3
    assert files(tmp_path) == []
