"""Large grammars are compiled in another process first, which is killed for its time or its memory.

A grammar that takes too long, takes too much memory or crashes the compiler ends that process instead of the
server. One that passes costs no more when it is compiled here. That it passed is remembered on the disk:
after a restart, an agent's tools wait for no other process.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from paceline.constraints import sandbox_process
from paceline.errors import Busy, ConstraintError

MAX_WAITING: Final = 8  # grammars at once; more are refused
IDLE_S: Final = 300.0  # without a grammar: the process is ended, and the next one waits for another
MAX_ACCEPTED: Final = 1024  # grammars that a folder remembers
MAX_HELD: Final = 16 << 20  # bytes that the process may keep after a grammar; with more it is ended
SLOWEST: Final = 30.0  # wall time for one second of CPU time, on a machine that has much else to do
_ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class SandboxSetup:
    """What the process needs to know."""

    tokenizer: str  # as JSON of the tokenizers library
    vocab: int
    eos: list[int]
    max_forced: int  # bytes
    seconds: float  # CPU time for one grammar
    memory: int  # bytes for one grammar


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


class AcceptedGrammars:
    """Grammars that have passed: files of a folder, named by a hash, each with the bytes that one takes.

    A file that cannot be read or written costs time, and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def taken(self, name: str) -> int | None:
        """None: it is not known."""
        try:
            taken = int((self._folder / name).read_text())
            os.utime(self._folder / name)
        except (OSError, ValueError):
            return None
        return taken if taken >= 0 else None

    def add(self, name: str, taken: int) -> None:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room()
            (self._folder / name).write_text(str(taken))

    def _make_room(self) -> None:
        """For one more; those that were asked for longest ago go."""
        with suppress(OSError):  # another process makes room as well
            files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for path in files[: max(0, len(files) + 1 - MAX_ACCEPTED)]:
                path.unlink(missing_ok=True)


class Sandbox:
    """Starts the process for its first grammar or by `start`, and again after it was ended.

    It is ended for a grammar's time or memory, when it keeps much memory, and when it is idle. Only this side
    ends it, between two grammars: none is sent to a process that is about to end.
    """

    def __init__(self, setup: SandboxSetup, accepted: AcceptedGrammars | None = None) -> None:
        self._setup, self._accepted = setup, accepted
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._idle: threading.Timer | None = None
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def start(self) -> None:
        """Has the process started, and does not wait for it. It ends when it is idle."""
        threading.Thread(target=self._start_idle, name="paceline-sandbox", daemon=True).start()

    def _start_idle(self) -> None:
        with self._lock, suppress(OSError):  # else the first grammar tells
            self._cancel_idle()
            self._running()
            self._end_when_idle()
        _ = self._setting

    def compile(self, grammar: str, limits: Mapping[str, int], forces: bool = True) -> tuple[str | None, int]:
        """The compiler's error, or None, and the bytes that the grammar takes. Any thread, one at a time.

        limits: llguidance's. forces: the grammar may prescribe text.

        Raises ConstraintError where the process was killed, and Busy where too many grammars wait already.
        """
        message = {"grammar": grammar, "limits": dict(limits), "forces": forces}
        if self._accepted is None:
            return self._try(message)
        name = self._name(message)
        if (known := self._accepted.taken(name)) is not None:
            return None, known
        error, taken = self._try(message)
        if error is None:
            self._accepted.add(name, taken)
        return error, taken

    def _name(self, message: Mapping[str, Any]) -> str:
        """A hash of all that decides whether a grammar passes."""
        return sha256(f"{self._setting} {_json(message)}".encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def _setting(self) -> str:
        """Of the compiler, the tokenizer and the limits of the process."""
        told = f"{version('llguidance')} {_json(asdict(self._setup))}"
        return sha256(told.encode("utf-8", "surrogatepass")).hexdigest()

    def _try(self, message: Mapping[str, Any]) -> tuple[str | None, int]:
        if not self._waiting.acquire(blocking=False):
            raise Busy(f"{MAX_WAITING} large constraints wait to be compiled already: try again later")
        try:
            with self._lock:
                self._cancel_idle()
                error, taken, held = self._compile(message)
                if held > MAX_HELD:
                    self.close()
                else:
                    self._end_when_idle()
                return error, taken
        finally:
            self._waiting.release()

    def _compile(self, message: Mapping[str, Any]) -> tuple[str | None, int, int]:
        """As compile, and the bytes that the process keeps."""
        process = self._running()
        killer = threading.Timer(SLOWEST * self._setup.seconds, process.kill)
        killer.daemon = True
        killer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            sandbox_process.write(process.stdin, message)  # type: ignore[arg-type]
            answer = sandbox_process.read(process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError):
            answer = None
        finally:
            killer.cancel()
        if answer is None:
            raise self._died(process)
        error, taken, held = answer
        return error, taken, held

    def _end_when_idle(self) -> None:
        self._idle = threading.Timer(IDLE_S, _end_idle, (weakref.ref(self),))
        self._idle.daemon = True
        self._idle.start()

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def end_idle(self, timer: threading.Timer) -> None:
        """Ends the process, unless a grammar has come since the timer was started."""
        with self._lock:
            if self._idle is timer:
                self.close()

    def _running(self) -> "subprocess.Popen[bytes]":
        """A process that has read the tokenizer."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._start()
        return self._process

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-I", sandbox_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
        )
        setup = self._setup
        message: dict[str, Any] = {name: getattr(setup, name) for name in setup.__slots__}
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            sandbox_process.write(process.stdin, message)  # type: ignore[arg-type]
            sandbox_process.read(process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError):
            process.kill()
        return process

    def _died(self, process: "subprocess.Popen[bytes]") -> ConstraintError:
        process.kill()
        code = process.wait()
        self.close()
        profiled = getattr(signal, "SIGPROF", None)
        if profiled is not None and code == -profiled:
            return ConstraintError(
                f"takes more than {self._setup.seconds:g} s to compile: simplify it (setting max_grammar_s)"
            )
        return ConstraintError(
            f"takes more than {self._setup.memory >> 20} MB or nests too deeply to be compiled: simplify it "
            "(setting max_grammar_mb)"
        )

    def close(self) -> None:
        """Ends the process."""
        self._cancel_idle()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):  # a message that it never read
                        stream.close()
            self._process = None

    def __del__(self) -> None:
        self.close()


def _end_idle(sandbox: "weakref.ref[Sandbox]") -> None:
    """Run by a timer, which does not keep the sandbox alive."""
    timer = threading.current_thread()
    if (found := sandbox()) is not None and isinstance(timer, threading.Timer):
        found.end_idle(timer)
