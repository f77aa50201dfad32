"""The background training process: lowest priority, pausable at any moment, dies with the server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

from paceline.errors import UsageError
from paceline.heads.head_checkpoint import WEIGHTS, read_card
from paceline.heads.versions import current
from paceline.limits import available_memory
from paceline.target.weights.reader import canonical_tensors, open_checkpoint
from paceline.trace.online import OnlineTrainingConfig

# -P: not from the working folder
COMMAND: Final = (sys.executable, "-P", "-m", "paceline.train.online.process_main")
_NICE: Final = 19
_OOM_SCORE: Final = 500  # of 1000: the kernel takes it before the server where memory runs out
_READ: Final = 1 << 16  # bytes

MB: Final = 1 << 20
FLOAT_BYTES: Final = 4  # the process computes in float32, whatever the server does
BASE_BYTES: Final = 400 * MB  # the interpreter and its libraries, without any weights
FUSED_WEIGHTS: Final = ("q", "k", "v", "gate", "up")  # held twice while the model is loaded
# Floats per parameter: weight, gradient, two moments of the optimizer, saved copy, evaluated copy.
FLOATS_PER_PARAMETER: Final = 6
FLOATS_PER_DRAFT_LOGIT: Final = 10  # that a training step keeps, at each position
FLOATS_PER_TARGET_LOGIT: Final = 3
WIDTH_ROWS: Final = 6  # rows of the model's width that a pass holds for each token
FF_ROWS: Final = 4  # rows of the feed-forward width


def check_platform() -> None:
    """Training must never delay a request: it needs signals that pause a process."""
    needed = {"SIGSTOP": signal, "SIGCONT": signal, "setpriority": os, "set_blocking": os}
    missing = [name for name, module in needed.items() if not hasattr(module, name)]
    if missing:
        raise UsageError(
            f"--online-training needs {missing[0]}, which this system does not have: leave it out"
        )


def _anonymous_file() -> IO[bytes]:
    in_memory = getattr(os, "memfd_create", None)
    return os.fdopen(in_memory("paceline-job"), "w+b") if in_memory else TemporaryFile()


class TrainerProcess:
    """Starts at once. The job, which holds text, is never on disk where the system has files in memory."""

    def __init__(self, job: bytes, command: Sequence[str] = COMMAND) -> None:
        with _anonymous_file() as stdin:
            stdin.write(job)
            stdin.seek(0)
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # the GPU is the server's
                process_group=0,  # a group that loses its server while it is stopped is ended by the system
            )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._rest = b""
        self._paused = False
        with suppress(ProcessLookupError):  # a process that has ended already is reported like any other
            os.setpriority(os.PRIO_PROCESS, self.pid, _NICE)
        _raise_oom_score(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        if not self._paused:
            self._process.send_signal(signal.SIGSTOP)
            self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._process.send_signal(signal.SIGCONT)
            self._paused = False

    @property
    def exit_code(self) -> int | None:
        """None: it still runs, or is paused. Below 0: the signal that ended it."""
        return self._process.poll()

    def messages(self) -> list[dict[str, Any]]:
        """Its messages since the last call."""
        while (more := self._read()) is not None:
            self._rest += more
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def _read(self) -> bytes | None:
        try:
            return os.read(self._out.fileno(), _READ) or None
        except BlockingIOError:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()


def _raise_oom_score(pid: int) -> None:
    """On Linux; a score that is higher already stays."""
    score = Path(f"/proc/{pid}/oom_score_adj")
    with suppress(OSError):
        if int(score.read_text()) < _OOM_SCORE:
            score.write_text(str(_OOM_SCORE))


def memory_shortage(
    model: Path, roots: Sequence[Path], config: OnlineTrainingConfig, available: int | None = None
) -> str:
    """A message if there is too little memory; empty if there is enough, or the system does not say.

    available: bytes; None: those available now.
    """
    available = available_memory() if available is None else available
    needed = needed_bytes(model, roots, config)
    if available is None or needed <= available:
        return ""
    return (
        f"online training needs about {needed // MB} MB of memory for a copy of the model, and "
        f"{available // MB} MB are available: drafters stay as they are; give the server more, "
        "or leave out --online-training"
    )


def needed_bytes(model: Path, roots: Sequence[Path], config: OnlineTrainingConfig) -> int:
    """The peak. Drafters are trained one after the other."""
    checkpoint = open_checkpoint(model)
    sizes = {name: stored.elements for name, stored in canonical_tensors(checkpoint)}
    weights = sum(sizes.values())
    twice = sum(size for name, size in sizes.items() if name.rpartition(".")[2] in FUSED_WEIGHTS)
    shape = checkpoint.shape
    one_pass = config.max_len * (WIDTH_ROWS * shape.width + FF_ROWS * shape.ff_width)
    batches = max(_drafter_floats(root, shape.width, shape.vocab_size, config) for root in roots)
    return BASE_BYTES + FLOAT_BYTES * (weights + max(twice, one_pass + batches))


def _drafter_floats(root: Path, width: int, vocab: int, config: OnlineTrainingConfig) -> int:
    """Floats besides the target: the head, the target's hidden states of the samples, and one step."""
    folder = current(root).folder
    card = read_card(folder)
    own = (folder / WEIGHTS).stat().st_size // (1 if card.weights == "int8" else FLOAT_BYTES)
    states = config.train_tokens * (len(card.shape.taps) + 1) * width
    position = (
        FLOATS_PER_DRAFT_LOGIT * card.shape.block * card.shape.draft_vocab + FLOATS_PER_TARGET_LOGIT * vocab
    )
    return FLOATS_PER_PARAMETER * own + states + config.batch_tokens * position
