"""Run by test_trained.py in a process of its own: bytes that drafters hold beside a target, and the peak.

python held_by_drafters.py MODEL DRAFTER...
"""

import gc
import json
import re
import sys
from pathlib import Path

from paceline import EngineConfig
from paceline.loading import find_heads, head_drafters, read_heads
from paceline.target.hardware import trim_heap
from paceline.target.load import load_target
from paceline.target.native.target import NativeTarget
from paceline.types import Drafter

CONFIG = EngineConfig("cpu", cache_mb=64)


def resident(what: str) -> int:
    """VmRSS: now. VmHWM: the most since the process began, or since it was last forgotten."""
    (kb,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kb) * 1024


def held() -> int:
    gc.collect()
    trim_heap()
    return resident("VmRSS")


def measured(model: Path, names: list[str]) -> list[tuple[int, int]]:
    """The memory of each drafter, and the peak while it was loaded."""
    target = load_target(model, CONFIG)
    assert isinstance(target, NativeTarget)

    def made(name: str) -> Drafter:
        (drafter,) = head_drafters(target, read_heads(find_heads([name]), model), CONFIG)
        return drafter

    kept, found = [], []
    for name in names:
        before = held()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        kept.append(made(name))
        found.append((held() - before, resident("VmHWM") - before))
    return found


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]), sys.argv[2:])))
