"""CPU features, probed in a child process where /proc/cpuinfo lies (AMX), and free memory.

Some machines list AMX among their features, yet its instructions are illegal, and a bfloat16 product that
chooses them kills the process. A child process tries one; if it dies, oneDNN is capped to an ISA without AMX.
"""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import torch

from paceline.atomic import read_json, write_json
from paceline.paths import home

Amx = Literal["absent", "works", "illegal"]

ISA_SETTING: Final = "ONEDNN_MAX_CPU_ISA"  # read when oneDNN is first used, not when torch is imported
WITHOUT_AMX: Final = "AVX10_1_512"
FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
_PATIENCE: Final = 120  # seconds
_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")
_M_ARENA_MAX: Final = -8  # of mallopt(3)
_TRIAL: Final = """
import torch
weight = torch.ones(256, 256, dtype=torch.bfloat16)
with torch.no_grad():
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    torch.ops.mkldnn._linear_pointwise(weight[:64], packed, None, "none", [], "")
    torch.nn.functional.linear(weight, weight)
"""


def prepare(dtype: torch.dtype) -> None:
    """Makes products of this type safe; to be called before the first one."""
    if dtype == torch.bfloat16 and ISA_SETTING not in os.environ and amx() == "illegal":
        os.environ[ISA_SETTING] = WITHOUT_AMX


def describe() -> dict[str, Any]:
    return {
        "cpu": name(),
        "cpu features": ", ".join(_listed(FLAGS)) or "none of interest",
        "amx": amx(),
        "max cpu isa": os.environ.get(ISA_SETTING) or "none",
        "cores": cores(),
        "memory": f"{_memory_bytes() / 2**30:.1f} GiB",
        "torch threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


@cache
def amx() -> Amx:
    """Probed once for each processor and torch version, then read from cpu.json."""
    if not _listed(("amx_tile",)):
        return "absent"
    path = home() / "cpu.json"
    key = f"{_cpuinfo().get('model name')}, torch {torch.__version__}"
    known = read_json(path)
    for result in ("works", "illegal"):
        if known.get(key) == result:
            return result
    result = _try_amx()
    with suppress(OSError):  # then it is tried again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known | {key: result})
    return result


def _try_amx() -> Amx:
    """Only a trial that ran to its end shows that AMX works."""
    environment = {name: value for name, value in os.environ.items() if name != ISA_SETTING}
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _TRIAL], env=environment, capture_output=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return "illegal"
    return "works" if trial.returncode == 0 else "illegal"


def trim_heap() -> None:
    """Hands freed heap memory to the system; glibc keeps it after many weights were made and dropped."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def limit_heap_arenas() -> None:
    """Lets all threads share one heap, to be called before they start.

    By default glibc gives each its own, and what one frees the others cannot use: a server seems to leak.
    malloc_trim(3) shortens only the first heap: what is free at the end of another would stay.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has(flags: Sequence[str]) -> bool:
    """True if the system lists all of these features, by the names of /proc/cpuinfo."""
    return _listed(tuple(flags)) == list(flags)


def _listed(flags: tuple[str, ...]) -> list[str]:
    have = _cpuinfo().get("flags", "").split()
    return [flag for flag in flags if flag in have]


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's entries; empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def available_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Bytes free on the machine and in every control group above the process; None where neither is known."""
    limits = [_machine_memory(proc), *_group_memory(proc, groups)]
    return min((max(0, free) for free in limits if free is not None), default=None)


def _machine_memory(proc: Path) -> int | None:
    kib = _table(proc / "meminfo").get("MemAvailable:")
    return None if kib is None else kib * 1024


def _group_memory(proc: Path, groups: Path) -> list[int | None]:
    """Free in the process's control group (cgroup v2) and in each one above it: every limit holds."""
    lines = _text(proc / "self" / "cgroup").splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    folder = groups / own
    return [_free_in_group(one) for one in (folder, *folder.parents) if one.is_relative_to(groups)]


def _free_in_group(folder: Path) -> int | None:
    """The page cache counts as used, though the kernel drops it when memory is needed."""
    limit, used = (_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
    if not limit.isdecimal() or not used.isdecimal():  # "max": no limit
        return None
    return int(limit) - int(used) + _table(folder / "memory.stat").get("inactive_file", 0)


def _table(path: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
