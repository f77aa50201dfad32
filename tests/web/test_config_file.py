"""Files an operator writes: what is refused, and when a change is seen."""

import logging
import os
import threading
from pathlib import Path

import pytest

from paceline.web.config_file import CHECK_EVERY_S, MAX_BYTES, ConfigFileError, ReloadingFile, read

WAIT_S = 60
LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigFileError) as refused:
        read(path, ConfigFileError)
    assert len(refused.value.problems) == 1
    line = refused.value.problems[0]
    assert "\n" not in line
    assert str(path.parent) not in line
    return line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LAUGHS, "line 1, column 4: anchors (&) and aliases (*) are not allowed"),
        ("a: *nowhere", "aliases (*) are not allowed"),
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' is there twice"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        ("[" * 5000, "nested more than 16 deep"),
        ("a: [1", "line 1"),
        ("a: 2024-99-99", "not YAML"),
        ("a: " + "9" * 5000, "not YAML"),
        ("--- 1\n--- 2\n", "line 2"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("? [a]\n: b", "unhashable key"),
        (b"a: \xff", "not UTF-8 text: see byte 3"),
        ("a: \x00", "not YAML"),
        ("#" * (MAX_BYTES + 1), "too large: expected at most 1,000,000 bytes"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    assert said in refusal(tmp_path / "f.yaml", content)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"^cannot read f.yaml: No such file or directory$"):
        read(tmp_path / "f.yaml", ConfigFileError)
    with pytest.raises(ConfigFileError, match="Is a directory"):
        read(tmp_path, ConfigFileError)


def test_yaml_and_json_are_read(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for content in ("\ufeffa: [1, 'é']\n", '{"a": [1, "\\u00e9"]}'):
        file.write_text(content, encoding="utf-8")
        assert read(file, ConfigFileError) == {"a": [1, "é"]}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def load_number(path: Path) -> int:
    data = read(path, ConfigFileError)
    if not isinstance(data, int):
        raise ConfigFileError("not a number", "at all")
    return data


def change(path: Path, content: str, mtime_s: int) -> None:
    path.write_text(content)
    os.utime(path, (mtime_s, mtime_s))


def test_a_change_is_seen_within_a_second_and_not_looked_for_more_often(tmp_path: Path) -> None:
    file, clock = tmp_path / "f", Clock()
    change(file, "1", 10)
    loads: list[int] = []

    def load(path: Path) -> int:
        loads.append(load_number(path))
        return loads[-1]

    reloaded = ReloadingFile(file, load, clock)
    change(file, "2", 20)
    clock.now += CHECK_EVERY_S * 0.9
    assert reloaded.current() == 1
    clock.now += CHECK_EVERY_S * 0.1 + 1e-6
    assert reloaded.current() == 2
    clock.now += 10
    assert reloaded.current() == 2
    assert loads == [1, 2]  # an unchanged file is not read


def test_a_change_of_size_alone_or_of_time_alone_is_seen(tmp_path: Path) -> None:
    file, clock = tmp_path / "f", Clock()
    change(file, "1", 10)
    reloaded = ReloadingFile(file, load_number, clock)
    for content, mtime in (("22", 10), ("33", 11)):
        change(file, content, mtime)
        clock.now += 2
        assert reloaded.current() == int(content)


def test_a_broken_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "f", Clock()
    change(file, "1", 10)
    reloaded = ReloadingFile(file, load_number, clock)
    with caplog.at_level(logging.ERROR, "paceline.web"):
        change(file, "one", 20)
        for _ in range(5):
            clock.now += 2
            assert reloaded.current() == 1
        assert [r.getMessage() for r in caplog.records] == [
            "f is not usable, the old one stays: not a number; at all"
        ]
        file.unlink()
        for _ in range(5):
            clock.now += 2
            assert reloaded.current() == 1
        assert len(caplog.records) == 2
        assert str(tmp_path) not in caplog.text
    change(file, "3", 30)
    clock.now += 2
    assert reloaded.current() == 3


def test_the_first_file_must_be_usable(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError):
        ReloadingFile(tmp_path / "f", load_number)


def test_nobody_waits_for_a_file_that_is_being_read(tmp_path: Path) -> None:
    file, clock = tmp_path / "f", Clock()
    change(file, "1", 10)
    reading, go_on = threading.Event(), threading.Event()

    def slow(path: Path) -> int:
        number = load_number(path)
        if number == 2:
            reading.set()
            assert go_on.wait(WAIT_S)
        return number

    reloaded = ReloadingFile(file, slow, clock)
    change(file, "2", 20)
    clock.now += 2
    reader = threading.Thread(target=reloaded.current)
    reader.start()
    assert reading.wait(WAIT_S)
    assert reloaded.current() == 1
    assert reader.is_alive()
    go_on.set()
    reader.join()
    assert reloaded.current() == 2
