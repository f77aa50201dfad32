"""Facts about machine, command and date that each result records."""

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.target.hardware import describe


def facts() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **describe(),
    }


def _commit() -> str:
    """Of the code that is measured; with "-dirty" if the code is another."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        changed = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", "src", "bench/*.py"], capture_output=True, check=False
        )
    except OSError:  # a bare machine
        return ""
    return head.stdout.strip() + ("-dirty" if changed.returncode == 1 else "")


def command(name: str, given: Sequence[str]) -> str:
    """The command that measures it again, with the names of files instead of their paths."""
    short = [Path(one).name if one.startswith(("/", "~", ".")) else one for one in given]
    return shlex.join(["python", "-m", "bench", name, *short])


def called(model: str) -> str:
    """The name of a model, or that of its file."""
    return Path(model).stem if model.endswith(".gguf") else model
