"""Runs code that a model wrote, in a child process with limits of time, memory and output.

The child gets neither the environment nor the site packages, starts in an empty folder, and refuses sockets,
processes, signals, ctypes and writing by an audit hook. This keeps accidents in. It is no boundary against an
attacker: run suites of code in a container where answers may be hostile.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

TIMEOUT_S: Final = 10.0
LIMITS: Final = {
    "RLIMIT_AS": 512 << 20,  # bytes of memory
    "RLIMIT_CPU": 5,  # seconds
    "RLIMIT_FSIZE": 1 << 20,  # bytes of output
    "RLIMIT_CORE": 0,
}
_PROCESS: Final = Path(__file__).with_name("code_sandbox_process.py")


def passes_tests(program: str, tests: str, entry_point: str, timeout_s: float = TIMEOUT_S) -> bool:
    """tests: define check(candidate), which raises where an answer is wrong."""
    return run_code(f"{program}\n\n{tests}\n\ncheck({entry_point})\n", timeout_s)


def run_code(program: str, timeout_s: float = TIMEOUT_S) -> bool:
    """True: it ran to its end, without an error, within the limits."""
    nonce = secrets.token_hex(16)
    given = f"{json.dumps(LIMITS)}\n{nonce}\n{program}".encode("utf-8", "replace")
    with (
        TemporaryDirectory(prefix="paceline-code-") as folder,
        open(Path(folder) / "output", "w+b") as output,
    ):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        try:
            child.communicate(given, timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _kill(child)
        output.seek(0)
        return child.returncode == 0 and output.read().endswith(nonce.encode())


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """The child and whatever it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:  # Windows
            child.kill()
    if child.stdin is not None:
        with suppress(OSError):
            child.stdin.close()
    child.wait()
