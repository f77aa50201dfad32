"""Cores and memory that this process may use: CPU affinity and control groups (cgroup v1 and v2) set limits.

A limit holds for all groups below the one that it is set for, so every group above the process is asked.

/proc/self/cgroup          its groups, "number:controllers:path"; "0::path" is that of v2
/sys/fs/cgroup/            the groups of v2, in `unified` where a machine has both
/sys/fs/cgroup/cpu,...     the groups of a controller of v1
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
GROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Memory:
    """Of one control group, in bytes."""

    limit: int
    used: int
    page_cache: int  # counted as used, though the kernel drops it when memory is needed

    @property
    def free(self) -> int:
        return self.limit - self.used + self.page_cache


def cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """CPUs that the process may run on, or fewer where its CPU quota is less: rounded up, at least 1."""
    quota = cpu_quota(proc, groups)
    least = min((n for n in (_affinity(), _cpuset(proc, groups)) if n), default=os.cpu_count() or 1)
    return least if quota is None else max(1, min(least, math.ceil(quota)))


def cpu_quota(proc: Path = PROC, groups: Path = GROUPS) -> float | None:
    """CPUs whose time the control groups allow, the least of them all; None: no limit."""
    found = [_quota_v2(_text(folder / "cpu.max")) for folder in _folders("", proc, groups)]
    for folder in _folders("cpu", proc, groups):
        found.append(_quota(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")))
    return min((quota for quota in found if quota is not None), default=None)


def total_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Bytes of the machine, or of a control group that has less; None where neither is known."""
    limits = [_machine_memory(proc), *(group.limit for group in _group_memory(proc, groups))]
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Bytes free on the machine and in every control group above the process; None where neither is known."""
    frees = [_meminfo(proc, "MemAvailable:"), *(group.free for group in _group_memory(proc, groups))]
    return min((max(0, free) for free in frees if free is not None), default=None)


def busy_seconds(proc: Path = PROC) -> float | None:
    """CPU time of all processes on the CPUs that this one may run on, in clock ticks; None: not known.

    Time that other virtual machines took from this one counts as well.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    ticks = 0
    for line in _text(
        proc / "stat"
    ).splitlines():  # "cpu3 user nice system idle iowait irq softirq steal ..."
        name, *values = line.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in allowed:
            times = [int(value) for value in values[:8]]
            ticks += sum(times) - sum(times[3:5])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def describe(proc: Path = PROC, groups: Path = GROUPS) -> str:
    """What is less than the machine has, in words."""
    installed, machine = os.cpu_count() or 1, _machine_memory(proc)
    found = []
    for what, count in (("CPU affinity", _affinity()), ("cpuset", _cpuset(proc, groups))):
        if count and count < installed:
            found.append(f"{what}: {count} of {installed} cores")
    if (quota := cpu_quota(proc, groups)) is not None and quota < installed:
        found.append(f"CPU quota: {quota:.3g} of {installed} cores")
    total = total_memory(proc, groups)
    if total is not None and (machine is None or total < machine):
        of = "" if machine is None else f" of {machine / 2**30:.1f}"
        found.append(f"memory limit: {total / 2**30:.1f}{of} GiB")
    return ", ".join(found) or "none"


def _affinity() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _cpuset(proc: Path, groups: Path) -> int | None:
    """CPUs of the smallest set that a control group has."""
    names = [folder / "cpuset.cpus.effective" for folder in _folders("", proc, groups)]
    names += [folder / "cpuset.effective_cpus" for folder in _folders("cpuset", proc, groups)]
    return min((count for count in map(_count, map(_text, names)) if count), default=None)


def _count(cpus: str) -> int:
    """How many CPUs a list such as "0-3,7" names; 0 for one that is empty or not understood."""
    total = 0
    for part in filter(None, cpus.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return 0
        total += int(last or first) - int(first) + 1
    return total


def _quota_v2(text: str) -> float | None:
    quota, _, period = text.strip().partition(" ")
    return _quota(quota, period)


def _quota(quota: str, period: str) -> float | None:
    """CPUs of microseconds in each period; no limit is "max" in v2 and -1 in v1."""
    if not quota.strip().isdecimal() or not period.strip().isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _machine_memory(proc: Path) -> int | None:
    try:
        return _meminfo(proc, "MemTotal:") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _meminfo(proc: Path, entry: str) -> int | None:
    """In bytes; None where the system is not Linux."""
    kib = _table(proc / "meminfo").get(entry)
    return None if kib is None else kib * 1024


def _group_memory(proc: Path, groups: Path) -> list[_Memory]:
    """Of every group that has a limit."""
    found = [
        _memory(folder, "memory.max", "memory.current", "inactive_file")
        for folder in _folders("", proc, groups)
    ]
    found += [
        _memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for folder in _folders("memory", proc, groups)
    ]
    return [memory for memory in found if memory is not None]


def _memory(folder: Path, limit: str, used: str, page_cache: str) -> _Memory | None:
    texts = [_text(folder / name).strip() for name in (limit, used)]
    if not all(text.isdecimal() for text in texts):  # "max": no limit
        return None
    most, now = map(int, texts)
    return _Memory(most, now, _table(folder / "memory.stat").get(page_cache, 0))


def _folders(controller: str, proc: Path, groups: Path) -> list[Path]:
    """Of the process's group of a controller of v1, or of v2 ("") for all of them, and of those above it.

    A container may see its own group as the top one, under another name than /proc gives.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            tops = (groups / controllers, groups / controller) if controller else (groups, groups / "unified")
            return [one for top in dict.fromkeys(tops) for one in _upwards(top / path.lstrip("/"), top)]
    return []


def _upwards(folder: Path, top: Path) -> list[Path]:
    return [one for one in (folder, *folder.parents) if one.is_relative_to(top)]


def _table(path: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
