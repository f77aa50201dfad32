"""Facts about this machine, and how paceline uses it."""

import platform
import sys
from typing import Any


def report() -> dict[str, Any]:
    import torch

    from paceline import __version__, hub
    from paceline.config import EngineConfig
    from paceline.sampling.native import describe as describe_sampling
    from paceline.target.eager.target import placement
    from paceline.target.hardware import describe

    device, dtype = placement(EngineConfig())
    home = hub.home()
    pulled = [m.name for m in hub.installed() if m.pulled]
    return {
        "paceline": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "system": platform.platform(),
        **describe(),
        "runs on": f"{device}, {str(dtype).removeprefix('torch.')} where torch runs it",
        "native engine": _native(device.type),
        "cuda kernels": _cuda(device.type),
        "disk cache": _disk_cache(device.type),
        "sampling": describe_sampling(),
        "PACELINE_HOME": str(home),
        "models pulled": ", ".join(pulled) or "none: run `paceline pull smollm2-135m`",
    }


def _native(device: str) -> str:
    """The path of the native engine that would run, and the reason."""
    from paceline import native_build
    from paceline.errors import NotCompiled
    from paceline.target.load import native_path
    from paceline.target.native import library

    if device != "cpu":
        return f"not used: models run on {device}"
    path, why = native_path()
    if path is None:
        return f"not used: {why}"
    try:
        library.load(path)
        prebuilt = library.build(path).parent == native_build.PREBUILT
    except NotCompiled as error:
        return f"not used: {error}"
    return f"{path}: {why}; {'prebuilt' if prebuilt else 'compiled here'}"


def _disk_cache(device: str) -> str:
    """Where a server keeps pages of the KV cache, or why it does not."""
    from paceline.target.kv.disk_cache import cache_folder
    from paceline.target.load import DISK_TIER

    used = not _native(device).startswith("not used")
    return f"in {cache_folder()} (--cache-dir)" if used else f"not used: {DISK_TIER}"


def _cuda(device: str) -> str:
    """Whether the CUDA kernels run here, or the reason against them; and the memory that is free."""
    import torch

    from paceline.target.cuda.driver import unusable

    if device != "cuda":
        return f"not used: models run on the {device}"
    free, total = torch.cuda.mem_get_info()
    reason = unusable(torch.device(device))
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"{'used' if reason is None else f'not used: {reason}'}, {memory}"


def model_report(name: str) -> dict[str, Any]:
    """How one model runs here, what its next turns reuse, and the cost of its passes."""
    from paceline import hub
    from paceline.config import EngineConfig
    from paceline.target.cost import cost_table
    from paceline.target.load import DISK_TIER, load_target
    from paceline.text import Tokenizer, check_own_turns

    path = hub.resolve(name)
    own_turns = check_own_turns(Tokenizer.load(path))
    target = load_target(path, EngineConfig())
    table = cost_table(target)
    first = next(iter(table.ms.values()), {})
    return {
        "model": name,
        "engine": target.describe(),
        "disk cache": "yes" if target.disk_tier else f"no: {DISK_TIER}",
        "weights": f"{target.bytes_held / 2**20:,.0f} MiB",
        "model memory": ", ".join(f"{use} {n / 2**20:,.0f} MiB" for use, n in target.memory().items()),
        "own_turns": {turn.kind: str(turn) for turn in own_turns},
        "cost_curve": {str(rows): ms for rows, ms in first.items()},
        "cost_by_context": {str(c): {str(n): ms for n, ms in row.items()} for c, row in table.ms.items()},
    }
