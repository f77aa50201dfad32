"""What this machine is and how paceline will use it."""

import platform
import sys
from typing import Any


def report() -> dict[str, Any]:
    import torch

    from paceline import __version__, models
    from paceline.config import EngineConfig
    from paceline.sampling.native import describe as describe_sampling
    from paceline.target.cpu import describe
    from paceline.target.torch_target import placement

    device, dtype = placement(EngineConfig())
    home = models.home()
    pulled = [m.name for m in models.installed() if m.pulled]
    return {
        "paceline": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "system": platform.platform(),
        **describe(),
        "runs on": f"{device}, {str(dtype).removeprefix('torch.')}",
        "sampling": describe_sampling(),
        "model folder": str(home),
        "models pulled": ", ".join(pulled) or "none: run `paceline pull smollm2-135m`",
    }
