"""Files are replaced whole or not at all, and locks end with their holders."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.atomic import (
    is_locked,
    locked,
    read_json,
    remove_unfinished,
    replacing,
    write_bytes,
    write_json,
)

HOLDS = """
import sys
from pathlib import Path
from paceline.atomic import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_file_is_replaced_only_when_its_writer_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("old")
    with replacing(path) as fresh:
        fresh.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("old")
    writer = replacing(path)
    writer.__enter__().write_text("half of the n")
    assert writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is False
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # renamed last
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("notes", "notes.0123.new", "other.0123.new"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path / "notes")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "other.0123.new"]


def test_a_file_has_its_permissions_from_the_first_byte_on(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with replacing(path, mode=0o600) as fresh:
        assert stat.S_IMODE(fresh.stat().st_mode) == 0o600
    write_bytes(path, b"x", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"x"


def test_json_that_is_missing_damaged_or_no_table_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    assert read_json(path) == {}
    for text in ("{", "[1]", "[" * 100_000):
        path.write_text(text)
        assert read_json(path) == {}
    write_json(path, {"a": "ü"})
    assert read_json(path) == {"a": "ü"}
    assert path.read_bytes().isascii()
    write_json(path, {"a": "ü"}, indent=1, ascii=False)
    assert path.read_text("utf-8") == '{\n "a": "ü"\n}\n'
    assert json.loads(path.read_bytes()) == {"a": "ü"}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_is_waited_for_and_free_when_its_holder_is_killed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "folder":
        path.mkdir()
    command = [sys.executable, "-c", HOLDS, str(path)]
    waited: list[bool] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        if kind == "file":
            assert is_locked(path)

        def on_wait() -> None:
            waited.append(True)
            holder.kill()

        with locked(path, on_wait):
            assert waited == [True]
    with locked(path, on_wait):
        assert waited == [True]
    assert not is_locked(tmp_path / "never")
    if kind == "file":
        assert not is_locked(path)
        assert os.access(path, os.W_OK)
