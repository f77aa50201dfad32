"""How to start a peer on a machine that advertises AMX and faults on it. Elsewhere there is nothing to do."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from bench.peers.systems import PEERS

SOURCE: Final = Path(__file__).parent / "refuse_amx.c"
LLAMA: Final = ("llama_server", "llama_python")
ONEDNN: Final = {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512"}


@dataclass(frozen=True)
class Choice:
    name: str = "as it is"
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@cache
def faults() -> bool:
    try:
        if "amx_tile" not in Path("/proc/cpuinfo").read_text():
            return False
    except OSError:
        return False
    from paceline.target.hardware import amx

    return amx() == "illegal"


def choices(driver: str) -> list[Choice]:
    """The ways to start a system here; the faster one is to be taken."""
    if not faults() or driver == "paceline":
        return [Choice()]
    if driver not in LLAMA:
        return [Choice("without AMX in oneDNN", ONEDNN)]
    plain = Choice("without repacked weights", settings={"no_extra_bufts": True})
    library = refusal()
    return [plain, Choice("AMX refused", {"LD_PRELOAD": str(library)})] if library else [plain]


@cache
def refusal() -> Path | None:
    """The library to preload, made on demand; None without a C compiler."""
    compiler, library = shutil.which("cc") or shutil.which("gcc"), PEERS / "refuse_amx.so"
    if compiler is None:
        return None
    PEERS.mkdir(exist_ok=True)
    done = subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=False)
    return library if done.returncode == 0 else None
