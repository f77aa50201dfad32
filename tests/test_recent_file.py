"""The file of the values used last: in order, within its bounds, and empty rather than wrong."""

import gc
import os
from pathlib import Path

import pytest

from paceline.recent_file import MAGIC, RecentFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "recent"


def opened(path: Path, max_values: int = 4, max_bytes: int = 1000) -> RecentFile:
    return RecentFile(path, max_values, max_bytes)


def noted(path: Path, *values: bytes, max_values: int = 4, max_bytes: int = 1000) -> list[bytes]:
    """What the next process reads after one that has used these."""
    file = opened(path, max_values, max_bytes)
    for value in values:
        file.note(value)
    file.flush()
    return opened(path, max_values, max_bytes).read()


def test_the_value_used_last_comes_first(path: Path) -> None:
    assert noted(path, b"a", b"", b"b", b"c", b"a") == [b"a", b"c", b"b"]
    assert opened(path.with_name("other")).read() == []


def test_a_longer_value_stands_for_its_beginnings(path: Path) -> None:
    assert noted(path, b"run", b"other", b"run, turn 2") == [b"run, turn 2", b"other"]
    assert noted(path, b"run") == [b"run", b"run, turn 2", b"other"]
    assert noted(path, b"x, turn 2", b"y", b"x") == [b"x, turn 2", b"y", b"run", b"run, turn 2"]


def test_values_used_longest_ago_go(path: Path) -> None:
    assert noted(path, *(bytes([65 + i]) for i in range(9))) == [b"I", b"H", b"G", b"F"]
    assert noted(path, b"z" * 40, b"y" * 50, max_bytes=60) == [b"y" * 50, b"I"]
    assert noted(path, b"w" * 61, max_bytes=60) == [b"y" * 50, b"I"]
    assert path.stat().st_size <= len(MAGIC) + 32 + 60


def test_processes_keep_one_anothers_values(path: Path) -> None:
    one, other = opened(path), opened(path)
    one.note(b"one")
    other.note(b"other")
    one.flush()
    other.flush()
    assert opened(path).read() == [b"other", b"one"]
    one.note(b"more")
    one.flush()
    assert opened(path).read() == [b"more", b"one", b"other"]


def test_it_is_its_owners_only_and_written_when_its_process_ends(path: Path) -> None:
    file = opened(path)
    file.note(b"secret")
    del file
    gc.collect()
    assert opened(path).read() == [b"secret"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_holds_nothing(path: Path) -> None:
    noted(path, b"one", b"two")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert opened(path).read() == []
        path.write_bytes(whole[:at])
        assert opened(path).read() == []
    path.write_bytes(whole + b"\0")
    assert opened(path).read() == []
    assert noted(path, b"three") == [b"three"]


def test_a_file_that_is_none_of_ours_is_not_read(path: Path) -> None:
    noted(path, b"one")
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)
    assert opened(path).read() == []
    path.unlink()
    os.mkfifo(path)  # reading it would wait for a writer
    assert opened(path).read() == []
    path.unlink()
    path.write_bytes(bytes(10_000))
    assert opened(path).read() == []


def test_a_folder_that_cannot_be_written_costs_nothing(path: Path) -> None:
    path.parent.write_text("a file")
    assert noted(path, b"one") == []
