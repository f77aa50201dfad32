"""CPU features, probed in a child process where /proc/cpuinfo lies (AMX).

Some machines list AMX among their features, yet its instructions are illegal, and a bfloat16 product that
chooses them kills the process. A child process tries one; if it dies, oneDNN is capped to an ISA without AMX.
Another tries the native engine's products on AMX tiles. Results are kept in cpu.json.
"""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

import torch

from paceline import limits
from paceline.atomic import read_json, write_json
from paceline.paths import home

_Result = TypeVar("_Result", bound=str)
Amx = Literal["absent", "works", "illegal"]
Tiles = Literal["untried", "illegal", "unequal", "slower", "faster"]

AMX: Final[tuple[Amx, ...]] = ("works", "illegal")
TILES: Final[tuple[Tiles, ...]] = get_args(Tiles)[1:]

ISA_SETTING: Final = "ONEDNN_MAX_CPU_ISA"  # read when oneDNN is first used, not when torch is imported
WITHOUT_AMX: Final = "AVX10_1_512"
FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "i8mm")
_PATIENCE: Final = 120  # seconds
_TILE_TRIAL: Final = (sys.executable, "-P", "-m", "paceline.target.native.amx_probe")
# Features of ARM by Linux's names: entry of getauxval(3) and bit (asm/hwcap.h), and macOS's sysctl(3).
_AT_HWCAP: Final = 16
_AT_HWCAP2: Final = 26
_HWCAPS: Final = {"asimd": (_AT_HWCAP, 1), "asimddp": (_AT_HWCAP, 20), "i8mm": (_AT_HWCAP2, 13)}
_SYSCTLS: Final = {
    "asimd": "hw.optional.AdvSIMD",
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
}
_M_ARENA_MAX: Final = -8  # of mallopt(3)
_SYS_ARCH_PRCTL: Final = 158  # of x86-64, and what arch_prctl(2) takes
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18
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


def set_torch_threads(threads: int) -> None:
    """0: as many as torch takes by itself, which heeds CPU affinity, or fewer where a CPU quota is less."""
    if threads:
        torch.set_num_threads(threads)
    elif limits.cpu_quota() is not None:
        torch.set_num_threads(min(torch.get_num_threads(), limits.cores()))


def describe() -> dict[str, Any]:
    return {
        "cpu": name(),
        "cpu features": ", ".join(_listed(FLAGS)) or "none of interest",
        "amx": amx(),
        "max cpu isa": os.environ.get(ISA_SETTING) or "none",
        "cores": limits.cores(),
        "memory": f"{(limits.total_memory() or 0) / 2**30:.1f} GiB",
        "limits": limits.describe(),
        "torch threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


@cache
def amx() -> Amx:
    """Probed once for each processor and torch version, then read from cpu.json."""
    if not _listed(("amx_tile",)):
        return "absent"
    return _remembered(f"torch {torch.__version__}", AMX, _try_amx)


@cache
def tiles(version: str) -> Tiles:
    """How the native engine's products on AMX tiles compare with those of AVX-512, tried as `amx` is.

    version: of the engine's code.
    """
    if not _listed(("amx_tile", "amx_int8")) or not allow_tiles():
        return "illegal"
    return _remembered(f"tiles {version}", TILES, _try_tiles)


def allow_tiles() -> bool:
    """Asks Linux to save the tiles of a thread; unless it agrees, their instructions are illegal."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return not ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)


def _remembered(what: str, results: tuple[_Result, ...], trial: Callable[[], _Result]) -> _Result:
    """The result of a trial on this processor: from cpu.json, else from the trial."""
    path, key = home() / "cpu.json", f"{_cpuinfo().get('model name')}, {what}"
    known = read_json(path)
    for result in results:
        if known.get(key) == result:
            return result
    result = trial()
    if result in results:
        with suppress(OSError):  # then it is tried again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known | {key: result})
    return result


def _try_tiles() -> Tiles:
    """What the trial printed; an illegal instruction kills it. Where it could not begin, nothing is known."""
    try:
        trial = subprocess.run(_TILE_TRIAL, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return "untried"
    if trial.returncode < 0:
        return "illegal"
    return next((result for result in TILES if result == trial.stdout.strip()), "untried")


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
    known = _cpuinfo()
    if "CPU part" in known:  # of ARM, which gives no name
        return f"ARM, implementer {known.get('CPU implementer')}, part {known['CPU part']}"
    return known.get("model name") or platform.processor() or platform.machine()


def has(flags: Sequence[str]) -> bool:
    """True if the system lists all of these features, by the names of Linux's /proc/cpuinfo."""
    return _listed(tuple(flags)) == list(flags)


def _listed(flags: tuple[str, ...]) -> list[str]:
    have = _arm_features() if on_arm() else _cpuinfo().get("flags", "").split()
    return [flag for flag in flags if flag in have]


def on_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")  # by the names of Linux and macOS


def _arm_features() -> list[str]:
    if platform.system() == "Darwin":
        return [feature for feature, entry in _SYSCTLS.items() if _sysctl(entry)]
    return [feature for feature, (entry, bit) in _HWCAPS.items() if _auxiliary_value(entry) >> bit & 1]


def _auxiliary_value(entry: int) -> int:
    """What the kernel told the process when it began; unlike /proc/cpuinfo it holds under an emulator too."""
    function = ctypes.CDLL(None).getauxval
    function.argtypes, function.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return int(function(entry))


def _sysctl(entry: str) -> int:
    """A number of macOS's; 0 where it does not know the entry."""
    value = ctypes.c_int64(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = ctypes.CDLL(None).sysctlbyname(entry.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's entries; empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
