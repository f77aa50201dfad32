"""What a result must say about where and when it was measured."""

import datetime
import platform
import subprocess
from typing import Any

import torch

from paceline.target.cpu import describe


def facts() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **describe(),
    }
