"""pip as a transport: downloads a wheel, never imports or installs it."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from paceline.errors import PullError
from paceline.hub.progress import POLL_SECONDS, bytes_under

_ADDRESS: Final = re.compile(r"(\(?from )?[a-z+]+://[^\s'\")]+\)?|\(?host='[^']*'(, port=\d+)?\)?")
_UNREACHABLE: Final = re.compile(
    r"connection broken|Failed to establish|timed out|NameResolution", re.IGNORECASE
)


class Fetch(Protocol):
    def __call__(self, requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
        """Puts the wheel of a requirement into an empty folder, telling how many bytes have arrived."""


def pip_download(requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
    failure, complaint = _run_pip(requirement, folder, arrived)
    if failure:
        if "No space left on device" in complaint:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise PullError(f"could not download {requirement}: {reason(complaint)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(
            f"could not download {requirement}: pip left {len(wheels)} wheels, expected 1; pull again"
        )
    return wheels[0]


def reason(complaint: str) -> str:
    """What pip said, in one line without addresses, and what to do about it."""
    if "No module named pip" in complaint:
        return f"pip is missing: run `{Path(sys.executable).name} -m ensurepip --upgrade`, then pull again"
    if _UNREACHABLE.search(complaint):
        return "the package index cannot be reached; check the network and pip's settings, then pull again"
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    said = " ".join(_ADDRESS.sub("", told[-1].removeprefix("ERROR:")).split())
    return f"pip says {said!r}; check pip's index settings, then pull again"


def _run_pip(requirement: str, folder: Path, arrived: Callable[[int], None]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    # pip writes to its temporary folder first: here, that can be watched and is on the disk we pull to.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            return _wait(process, lambda: arrived(bytes_under(folder)))
        finally:
            process.kill()  # does nothing when pip has ended by itself


def _wait(process: subprocess.Popen[str], tick: Callable[[], None]) -> tuple[int, str]:
    while True:
        try:
            _, complaint = process.communicate(timeout=POLL_SECONDS)
            return process.returncode, complaint
        except subprocess.TimeoutExpired:
            tick()
