"""What a result must say about where and when it was measured."""

import datetime
import platform
import subprocess
from typing import Any

import torch

from paceline.target.cpu import describe


def facts() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **describe(),
    }


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:  # a bare machine
        return ""
    return done.stdout.strip()
