"""A tiny catalogue model, its wheels, and ways to break a pull half way."""

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from paceline.errors import UnknownModel
from paceline.hub import CATALOGUE, CatalogueModel, Piece, resolve

CONTENT = bytes(range(256)) * 4
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # these tests write and delete a lot
CUTS = (100, 100)  # three pieces, one of them empty


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def slices(content: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(content)]
    return [content[start:stop] for start, stop in pairwise(edges)]


def tiny_model(content: bytes = CONTENT, cuts: Sequence[int] = CUTS) -> CatalogueModel:
    pieces = tuple(
        Piece(f"tiny-part{number}==1.0", f"tiny_part{number}/data.bin", len(part), sha(part))
        for number, part in enumerate(slices(content, cuts))
    )
    return CatalogueModel("tiny", "Tiny", "MIT", "tiny.gguf", sha(content), pieces)


def write_wheel(path: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)


@dataclass
class Shelf:
    """A transport that hands out the wheels of a model and remembers which were asked for."""

    model: CatalogueModel
    content: bytes = CONTENT
    asked: list[str] = field(default_factory=list)
    spoil: Callable[[Path], None] = lambda wheel: None
    step: Callable[[], None] = lambda: None

    def __call__(self, requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
        self.step()
        self.asked.append(requirement)
        index = [piece.requirement for piece in self.model.pieces].index(requirement)
        piece, start = self.model.pieces[index], self.model.offset(index)
        path = folder / f"{requirement}-any.whl"
        path.write_bytes(b"half a wheel")
        arrived(piece.size // 2)
        self.step()
        write_wheel(path, piece.member, self.content[start : start + piece.size])
        arrived(2 * piece.size)
        self.spoil(path)
        return path


@contextmanager
def shop(model: CatalogueModel) -> Iterator[Path]:
    """An empty home and a catalogue that has the model; syncing is left out, for speed."""
    with TemporaryDirectory(dir=IN_MEMORY) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_HOME", folder)
        patch.setitem(CATALOGUE, model.name, model)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield Path(folder)


class Fuse:
    """Blows once, at the given step."""

    def __init__(self, steps: int, blow: Callable[[], None]) -> None:
        self.left, self.blow = steps, blow

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.blow()

    @contextmanager
    def laid(self) -> Iterator[None]:
        """Every rename and every sync is a step; so is what else calls step()."""
        rename = os.replace
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: self.step())

            def stepping_replace(source: Path, goal: Path) -> None:
                self.step()
                rename(source, goal)
                self.step()

            patch.setattr(os, "replace", stepping_replace)
            yield


def interrupt() -> None:
    raise KeyboardInterrupt


def absent_or_whole(content: bytes) -> bool:
    try:
        return resolve("tiny").read_bytes() == content
    except UnknownModel:
        return True
