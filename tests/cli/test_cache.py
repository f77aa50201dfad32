"""paceline cache: what is on the disk, and how it goes."""

import json
from pathlib import Path
from zlib import crc32

import pytest

from paceline.atomic import write_json
from paceline.cli import main
from paceline.hub.local_models import MANIFEST
from paceline.loading import model_fingerprint
from paceline.target.kv.disk_cache import DiskCache
from paceline.target.kv.page_file import PageFormat
from support.servers import toy_chat_model


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["cache", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def fill(folder: Path, name: str, pages: int, weights: str = "") -> None:
    format = PageFormat(bytes(name.ljust(32), "ascii"), lambda page: crc32(page.data))
    disk = DiskCache(folder, format, 1 << 20, lambda rows: 100 * rows, 16, name, weights)
    for key in disk.keys("", range(16 * pages))[1:]:
        disk.offer(key, 16, lambda page: page.fill(1))
    assert disk.flush()


def test_models_are_listed_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert "nothing is cached" in output(capsys, "ls")
    fill(tmp_path / "kv", "small", 3)
    fill(tmp_path / "kv", "large", 5)
    listed = json.loads(output(capsys, "ls", "--json"))
    assert {model["model"]: (model["pages"], model["bytes"]) for model in listed} == {
        "small": (3, 3 * 4096),
        "large": (5, 5 * 4096),
    }
    assert "small" in output(capsys, "ls")
    assert output(capsys, "clear", "--model", "small") == "3 pages removed\n"
    other = ("--cache-dir", str(tmp_path / "other"))
    assert output(capsys, "clear", *other) == "0 pages removed\n"
    assert [model["model"] for model in json.loads(output(capsys, "ls", "--json"))] == ["large"]
    assert output(capsys, "clear") == "5 pages removed\n"
    assert json.loads(output(capsys, "ls", "--json")) == []


def test_a_model_that_was_pulled_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "owner" / "toy:Q8_0"
    folder.mkdir(parents=True)
    file = toy_chat_model(folder)
    write_json(folder / MANIFEST, {"file": file.name, "files": [file.name], "size": file.stat().st_size})
    fill(tmp_path / "kv", file.stem, 3, model_fingerprint(file))
    fill(tmp_path / "kv", "removed-since", 2, "other weights")
    listed = json.loads(output(capsys, "ls", "--json"))
    assert {model["model"] for model in listed} == {"owner/toy:Q8_0", "removed-since"}
    with pytest.raises(SystemExit) as ended:
        main(["cache", "clear", "--model", "owner/tyo"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "unknown model 'owner/tyo'" in message
    assert {"owner/toy:Q8_0", "removed-since"} <= set(message.split("Known: ")[1].strip().split(", "))
    assert output(capsys, "clear", "--model", "owner/toy") == "3 pages removed\n"
    assert output(capsys, "clear", "--model", "owner/toy") == "0 pages removed\n"
    assert output(capsys, "clear", "--model", "removed-since") == "2 pages removed\n"
    with pytest.raises(SystemExit) as ended:
        main(["cache", "clear", "--model", "removed-since"])
    assert ended.value.code == 2
    assert "nothing is cached" in capsys.readouterr().err
