"""The parent's half of the protocol: a system in a process of its own, which may crash or hang."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.peers.wire import Answer

ROOT: Final = Path(__file__).parent.parent.parent
LAST_WORDS: Final = 300  # characters


class PeerFailed(Exception):
    """A system crashed, hung, or said that it cannot."""


def _with_root(paths: str | None) -> str:
    """So that a driver finds this package from any environment."""
    return os.pathsep.join(filter(None, [str(ROOT), paths]))


class Child:
    """One system, from start to end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the child)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _with_root(os.environ.get("PYTHONPATH")), **(environment or {})},
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._closed = False
        self.load_seconds = 0.0
        self.version = ""

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def load(self, timeout: float, **request: Any) -> None:
        started = time.monotonic()
        self.version = str(self.ask({"do": "load", **request}, timeout)["version"])
        self.load_seconds = time.monotonic() - started

    def generate(self, timeout: float, **request: Any) -> Answer:
        return Answer(**self.ask({"do": "generate", **request}, timeout))

    def peak_mb(self, timeout: float = 30) -> float:
        return float(self.ask({"do": "end"}, timeout)["peak_mb"])

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        if self._closed:
            raise PeerFailed("it was ended before")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=max(timeout, 0.001))
        except (OSError, ValueError):
            raise PeerFailed(self._obituary()) from None
        except queue.Empty:
            self.close()
            raise PeerFailed(f"no answer to {request['do']!r} within {timeout:.0f} s") from None
        if not line:
            raise PeerFailed(self._obituary())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _obituary(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        self._log.seek(0)
        words = self._log.read().strip().splitlines()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        last = words[-1].replace(f"{ROOT}/", "") if words else "no message"
        return f"ended by {how}: {last[:LAST_WORDS]}"

    def close(self) -> None:
        """Ends the process and whatever it started."""
        self._closed = True
        for ending in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, ending)
            except ProcessLookupError:
                break
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                continue
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
