"""paceline advise: its options. tests/advise has the rest."""

from pathlib import Path

import pytest

from paceline.cli import main


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["advise", "--target", "no-such-model", *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    return err


def test_traffic_comes_from_files_or_from_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert "either --traces FILE, or --store URL" in failure(capsys)
    assert "either --traces" in failure(capsys, "--traces", "a.jsonl", "--store", "b.db")


def test_a_routes_file_that_is_unusable_is_found_before_any_time_is_spent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    routes = tmp_path / "routes.yaml"
    routes.write_text("routes: [{nam: a}]")
    assert "nam" in failure(capsys, "--traces", str(tmp_path / "none.jsonl"), "--routes", str(routes))


def test_missing_traffic_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "none.jsonl does not exist" in failure(capsys, "--traces", str(tmp_path / "none.jsonl"))
