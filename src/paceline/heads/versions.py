"""Versions of a drafter: the first in its folder itself, those it learned since in versions/0001 and so on.

One small file names the version that serves. It is replaced whole, and only once the version is there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import CorruptModel, SettingError, UnknownModel
from paceline.heads.folder import CARD, read_card, write_whole
from paceline.heads.shelf import in_package

FOLDER: Final = "versions"
POINTER: Final = "current.json"
MOST: Final = 8  # kept of those that were learned
_MAKING: Final = ".making-"


@dataclass(frozen=True, slots=True)
class Version:
    number: int  # 0: as it was trained
    folder: Path


def current(root: Path) -> Version:
    """The one that serves. A drafter that was trained anew begins with its first again."""
    if not (root / POINTER).exists() or not (root / CARD).exists():
        return Version(0, root)
    try:
        table = json.loads((root / POINTER).read_bytes())
        number, first = int(table["version"]), str(table["first"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptModel(f"{POINTER} of {root.name} is damaged: go back with {_way_back(root)}") from None
    if number == 0 or first != _mark(root):
        return Version(0, root)
    if number not in numbers(root):
        raise CorruptModel(f"{root.name} has lost its version {number}: go back with {_way_back(root)}")
    return Version(number, folder_of(root, number))


def numbers(root: Path) -> list[int]:
    """Of all versions that are there, ascending; the first is always 0."""
    found = (path.parent.name for path in (root / FOLDER).glob(f"*/{CARD}"))
    return [0, *sorted(int(name) for name in found if name.isdecimal() and int(name))]


def folder_of(root: Path, number: int) -> Path:
    return root / FOLDER / f"{number:04}" if number else root


def use(root: Path, number: int) -> None:
    """From now on this version serves."""
    _writable(root)
    known = numbers(root)
    if number not in known:
        raise UnknownModel(
            f"{root.name} has no version {number}: expected one of {', '.join(map(str, known))}"
        )
    table = {"version": number, "first": _mark(root)}
    write_whole(root / POINTER, (json.dumps(table) + "\n").encode())


def before(root: Path) -> int:
    """Which version the current one was learned from, or the last before it that is still there."""
    now = current(root)
    if now.number == 0:
        raise UnknownModel(f"{root.name} serves as it was trained: there is no version before that")
    learned = read_card(now.folder).data.get("learned")
    source = learned.get("from") if isinstance(learned, dict) else None
    older = [number for number in numbers(root) if number < now.number]
    return source if source in older else older[-1]


@contextmanager
def making(root: Path) -> Iterator[Path]:
    """A folder to make a version in, gone in the end unless `add` took it."""
    _writable(root)
    for old in (root / FOLDER).glob(f"{_MAKING}*"):
        if not _runs(old.name.removeprefix(_MAKING)):  # its maker was killed
            shutil.rmtree(old, ignore_errors=True)
    folder = root / FOLDER / f"{_MAKING}{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def add(root: Path, made: Path, most: int = MOST) -> int:
    """Gives what was made in a folder the next number. It does not serve yet."""
    number = numbers(root)[-1] + 1
    while True:
        try:
            made.rename(folder_of(root, number))
            break
        except OSError:
            if not folder_of(root, number).exists():
                raise
            number += 1  # another server was quicker
    _drop_oldest(root, most, number)
    return number


def _drop_oldest(root: Path, most: int, new: int) -> None:
    learned = numbers(root)[1:]
    spare = [number for number in learned if number not in (current(root).number, new)]
    for number in spare[: max(0, len(learned) - most)]:
        shutil.rmtree(folder_of(root, number), ignore_errors=True)


def _writable(root: Path) -> None:
    if in_package(root):
        raise SettingError(f"{root.name} is part of the package and never changes: it has one version")


def _mark(root: Path) -> str:
    """Tells one training of the drafter from another."""
    return hashlib.sha256((root / CARD).read_bytes()).hexdigest()[:16]


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _way_back(root: Path) -> str:
    return f"`paceline drafters rollback {root.name} 0`"
