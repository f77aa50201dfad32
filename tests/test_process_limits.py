"""Cores and memory that a process may use: the machine's, or less by control groups and CPU affinity."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline import limits
from paceline.config import EngineConfig
from paceline.errors import SettingError

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
NO_LIMIT = 9223372036854771712  # of v1


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 cores with 1000 of 4000 MB left, and a process in the group a/b."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    write(tmp_path / "proc/meminfo", f"MemTotal: {4000 * KB} kB\nMemAvailable: {1000 * KB} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    return tmp_path


@pytest.fixture
def old(system: Path) -> Path:
    """The same, with groups of v1; those of v2 have no controllers."""
    lines = "12:cpuset:/a/b\n5:cpu,cpuacct:/a/b\n4:memory:/a/b\n1:name=systemd:/x\n0::/a/b\n"
    write(system / "proc/self/cgroup", lines)
    return system


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(system: Path, name: str, most: str, used: int, cached: int = 0) -> None:
    folder = system / "groups" / name
    write(folder / "memory.max", f"{most}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon {used - cached}\ninactive_file {cached}\n")


def old_group(system: Path, name: str, most: int, used: int, cached: int = 0) -> None:
    folder = system / "groups/memory" / name
    write(folder / "memory.limit_in_bytes", f"{most}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", f"inactive_file 7\ntotal_inactive_file {cached}\n")


def room(system: Path) -> int | None:
    return limits.available_memory(system / "proc", system / "groups")


def total(system: Path) -> int | None:
    return limits.total_memory(system / "proc", system / "groups")


def cores(system: Path) -> int:
    return limits.cores(system / "proc", system / "groups")


def described(system: Path) -> str:
    return limits.describe(system / "proc", system / "groups")


# ---- memory


def test_without_limits_it_is_the_machine_s(system: Path) -> None:
    assert room(system) == 1000 * MB
    group(system, "a/b", "max", 700 * MB)
    assert (room(system), total(system)) == (1000 * MB, 4000 * MB)
    assert described(system) == "none"


@pytest.mark.parametrize("name", ["a/b", "a", ""])
def test_the_limit_of_a_group_and_of_those_above_it_holds(system: Path, name: str) -> None:
    group(system, "a/b", "max", 100 * MB)
    group(system, name, str(500 * MB), 300 * MB)
    assert (room(system), total(system)) == (200 * MB, 500 * MB)
    assert described(system) == "memory limit: 0.5 of 3.9 GiB"


def test_the_strictest_holds_and_what_was_read_from_files_can_go(system: Path) -> None:
    group(system, "a", str(500 * MB), 450 * MB, cached=350 * MB)
    assert room(system) == 400 * MB
    group(system, "a/b", str(200 * MB), 300 * MB)
    assert room(system) == 0


@pytest.mark.parametrize("name", ["a/b", "a", ""])
def test_groups_of_v1_too(old: Path, name: str) -> None:
    old_group(old, "a/b", NO_LIMIT, 100 * MB)
    assert (room(old), total(old)) == (1000 * MB, 4000 * MB)
    old_group(old, name, 500 * MB, 450 * MB, cached=350 * MB)
    assert (room(old), total(old)) == (400 * MB, 500 * MB)


def test_a_container_that_is_the_top_of_what_it_sees(old: Path) -> None:
    """Its name in /proc is the machine's."""
    write(old / "proc/self/cgroup", "4:memory:/docker/0123\n5:cpu,cpuacct:/docker/0123\n")
    old_group(old, "", 500 * MB, 300 * MB)
    write(old / "groups/cpu,cpuacct/cpu.cfs_quota_us", "400000\n")
    write(old / "groups/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert (room(old), cores(old)) == (200 * MB, 4)


def test_a_system_that_does_not_report_it_gives_none(tmp_path: Path) -> None:
    assert room(tmp_path) is None


# ---- cores


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 16), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 16), ("rubbish", 16)],
)
@pytest.mark.parametrize("name", ["a/b", "a", ""])
def test_a_quota_is_rounded_up(system: Path, name: str, text: str, expected: int) -> None:
    write(system / "groups" / name / "cpu.max", f"{text}\n")
    assert cores(system) == expected


def test_the_smallest_quota_of_all_groups_holds(system: Path) -> None:
    write(system / "groups/a/cpu.max", "200000 100000\n")
    write(system / "groups/a/b/cpu.max", "800000 100000\n")
    assert cores(system) == 2
    assert described(system) == "CPU quota: 2 of 16 cores"


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_quotas_of_v1(old: Path, folder: str) -> None:
    write(old / "groups" / folder / "a/cpu.cfs_quota_us", "150000\n")
    write(old / "groups" / folder / "a/cpu.cfs_period_us", "50000\n")
    write(old / "groups" / folder / "a/b/cpu.cfs_quota_us", "-1\n")
    write(old / "groups" / folder / "a/b/cpu.cfs_period_us", "100000\n")
    assert cores(old) == 3


def test_groups_of_v2_beside_those_of_v1(old: Path) -> None:
    write(old / "groups/unified/a/cpu.max", "500000 100000\n")
    assert cores(old) == 5


def test_cpusets_and_affinity(system: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(old / "groups/cpuset/a/b/cpuset.effective_cpus", "0-3,8,10-11\n")
    assert cores(old) == 7
    write(old / "groups/a/b/cpuset.cpus.effective", "2-4\n")
    assert cores(old) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2}, raising=False)
    assert cores(old) == 2
    assert described(old) == "CPU affinity: 2 of 16 cores, cpuset: 3 of 16 cores"
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert cores(old) == 3


def test_without_any_file_it_is_the_machine_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores(tmp_path) == 6


def test_the_time_of_all_processes_is_that_of_the_cpus_of_this_one(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither idle nor waiting for a disk; time taken by other virtual machines counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 12}, raising=False)
    hertz = os.sysconf("SC_CLK_TCK")
    lines = [f"cpu{i} {1000 * i} 20 3 9999 888 7 5 4 66 66" for i in (0, 1, 2, 12)]
    write(system / "proc/stat", "\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 5", "cpufreq 3"]))
    assert limits.busy_seconds(system / "proc") == pytest.approx((13_000 + 2 * 39) / hertz)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {40}, raising=False)
    assert limits.busy_seconds(system / "proc") is None
    assert limits.busy_seconds(system / "none") is None


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cores", lambda: 3)
    assert EngineConfig(threads=3).threads == 3
    with pytest.raises(SettingError, match=r"0 \(all cores\) to 3"):
        EngineConfig(threads=4)


# ---- this machine


def test_this_one_says() -> None:
    found, most = limits.available_memory(), limits.total_memory()
    assert found is None or most is None or 0 < found <= most
    assert 1 <= limits.cores() <= (os.cpu_count() or 1)


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A real group of v1 below this process's own, with a quota of half a core."""
    own = next(iter(limits._folders("cpu", limits.PROC, limits.GROUPS)), None)
    folder = Path(own or "/nowhere", f"paceline-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


def test_a_process_in_a_real_group(half_a_core: Path) -> None:
    """It enters the group by itself, so no other process is in it when it ends."""
    text = (
        "import os, sys; from pathlib import Path; from paceline import limits\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "print(limits.cores(), limits.cpu_quota())"
    )
    command = [sys.executable, "-c", text, str(half_a_core)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["1", "0.5"], done.stderr
