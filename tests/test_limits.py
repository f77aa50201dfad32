"""Free memory: the machine's, or less where a container has less."""

from pathlib import Path

import pytest

from paceline.limits import available_memory

KB, MB = 1 << 10, 1 << 20


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with 1000 MB left, and a process in the group a/b."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {4000 * KB} kB\nMemAvailable: {1000 * KB} kB\n")
    write(tmp_path / "proc/self/cgroup", "4:memory:/old\n0::/a/b\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(system: Path, name: str, most: str, used: int, cached: int = 0) -> None:
    folder = system / "groups" / name
    write(folder / "memory.max", f"{most}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon {used - cached}\ninactive_file {cached}\n")


def room(system: Path) -> int | None:
    return available_memory(system / "proc", system / "groups")


def test_without_limits_it_is_the_machine_s(system: Path) -> None:
    assert room(system) == 1000 * MB
    group(system, "a/b", "max", 700 * MB)
    assert room(system) == 1000 * MB


@pytest.mark.parametrize("name", ["a/b", "a", ""])
def test_the_limit_of_a_group_and_of_those_above_it_holds(system: Path, name: str) -> None:
    group(system, "a/b", "max", 100 * MB)
    group(system, name, str(500 * MB), 300 * MB)
    assert room(system) == 200 * MB


def test_the_strictest_holds_and_what_was_read_from_files_can_go(system: Path) -> None:
    group(system, "a", str(500 * MB), 450 * MB, cached=350 * MB)
    assert room(system) == 400 * MB
    group(system, "a/b", str(200 * MB), 300 * MB)
    assert room(system) == 0


def test_a_system_that_does_not_report_it_gives_none(tmp_path: Path) -> None:
    assert room(tmp_path) is None


def test_this_one_says() -> None:
    found = available_memory()
    assert found is None or found > 0
