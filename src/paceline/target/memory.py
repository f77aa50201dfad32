"""How much memory a process may still take, of the machine's and of its container's."""

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")


def available(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Bytes that can be taken without pushing others out; None where the system does not say."""
    said = [_of_machine(proc), *_of_groups(proc, groups)]
    return min((max(0, room) for room in said if room is not None), default=None)


def _of_machine(proc: Path) -> int | None:
    found = _table(proc / "meminfo").get("MemAvailable:")
    return None if found is None else found * 1024


def _of_groups(proc: Path, groups: Path) -> list[int | None]:
    """Of the process's control group and all above it (cgroup v2): the limit of each holds."""
    lines = _text(proc / "self" / "cgroup").splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    folder = groups / own
    return [_of_group(one) for one in (folder, *folder.parents) if one.is_relative_to(groups)]


def _of_group(folder: Path) -> int | None:
    """What was read from files counts as used, and goes when it is needed."""
    most, used = (_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
    if not most.isdecimal() or not used.isdecimal():  # "max": no limit
        return None
    return int(most) - int(used) + _table(folder / "memory.stat").get("inactive_file", 0)


def _table(path: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
