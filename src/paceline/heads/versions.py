"""Versions of a drafter: 0 is its folder, those from online training are in versions/0001 and so on.

current.json names the version in use. It is replaced atomically, after the version is complete. Processes
that share the folder, on other machines too, exclude one another by file locks, which die with their holders.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from paceline.atomic import is_locked, locked, rename, write_json
from paceline.errors import CorruptModel, UnknownModel, UsageError
from paceline.heads.head_checkpoint import CARD, read_card
from paceline.heads.local_heads import in_package

FOLDER: Final = "versions"
POINTER: Final = "current.json"
MAX_VERSIONS: Final = 8  # besides version 0
_MAKING: Final = ".making-"
_LOCK: Final = ".lock"


@dataclass(frozen=True, slots=True)
class Version:
    number: int  # 0: as it was trained
    folder: Path


def current(root: Path) -> Version:
    """The version in use. After the folder was trained again it is version 0."""
    if not (root / POINTER).exists() or not (root / CARD).exists():
        return Version(0, root)
    try:
        table = json.loads((root / POINTER).read_bytes())
        number, first = int(table["version"]), str(table["first"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptModel(f"{POINTER} of {root.name} is damaged: go back with {_way_back(root)}") from None
    if number == 0 or first != _fingerprint(root):
        return Version(0, root)
    if number not in numbers(root):
        raise CorruptModel(f"{root.name} has lost its version {number}: go back with {_way_back(root)}")
    return Version(number, folder_of(root, number))


def numbers(root: Path) -> list[int]:
    """All versions on disk, ascending; the first is always 0."""
    names = (path.parent.name for path in (root / FOLDER).glob(f"*/{CARD}"))
    return [0, *sorted(int(name) for name in names if name.isdecimal() and int(name))]


def folder_of(root: Path, number: int) -> Path:
    return root / FOLDER / f"{number:04}" if number else root


def serving(root: Path) -> str:
    """Identifies the version in use and the training it belongs to."""
    return f"{current(root).number} of {_fingerprint(root)}"


def use(root: Path, number: int) -> None:
    """Puts a version to use."""
    _writable(root)
    with _locked(root / FOLDER / _LOCK):
        _name(root, number)


def take_over(root: Path, number: int, learned_from: str, max_versions: int = MAX_VERSIONS) -> bool:
    """Puts a new version to use if the one it was trained from is still in use; else deletes it.

    learned_from: `serving` when its training began. max_versions: the oldest beyond that are deleted.
    """
    _writable(root)
    with _locked(root / FOLDER / _LOCK):
        if serving(root) != learned_from:
            if current(root).number != number:
                shutil.rmtree(folder_of(root, number), ignore_errors=True)
            return False
        _name(root, number)
        _drop_oldest(root, max_versions)
        return True


def _name(root: Path, number: int) -> None:
    known = numbers(root)
    if number not in known:
        raise UnknownModel(
            f"{root.name} has no version {number}: expected one of {', '.join(map(str, known))}"
        )
    write_json(root / POINTER, {"version": number, "first": _fingerprint(root)})


def before(root: Path) -> int:
    """The version that the current one was trained from, or the last before it that is on disk."""
    now = current(root)
    if now.number == 0:
        raise UnknownModel(f"{root.name} serves as it was trained: there is no version before that")
    learned = read_card(now.folder).data.get("learned")
    source = learned.get("from") if isinstance(learned, dict) else None
    older = [number for number in numbers(root) if number < now.number]
    return source if source in older else older[-1]


@contextmanager
def making(root: Path) -> Iterator[Path]:
    """A folder for a new version, deleted in the end unless `add` has renamed it."""
    _writable(root)
    for old in (root / FOLDER).glob(f"{_MAKING}*/"):
        if not is_locked(_lock_of(old)):  # its writer was killed
            shutil.rmtree(old, ignore_errors=True)
            _lock_of(old).unlink(missing_ok=True)
    folder = root / FOLDER / f"{_MAKING}{uuid4().hex}"
    with _locked(_lock_of(folder)):  # taken before the folder exists, so that no other process deletes it
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _lock_of(folder).unlink(missing_ok=True)


def add(root: Path, made: Path) -> int:
    """Renames the folder to the next number. It is not in use yet."""
    number = numbers(root)[-1] + 1
    while True:
        try:
            rename(made, folder_of(root, number))
            return number
        except OSError:
            if not folder_of(root, number).exists():
                raise
            number += 1  # another server took the number


def _drop_oldest(root: Path, max_versions: int) -> None:
    learned = numbers(root)[1:]
    spare = [number for number in learned if number != current(root).number]
    for number in spare[: max(0, len(learned) - max_versions)]:
        shutil.rmtree(folder_of(root, number), ignore_errors=True)


def _writable(root: Path) -> None:
    if in_package(root):
        raise UsageError(f"{root.name} is part of the package and never changes: it has one version")


def _fingerprint(root: Path) -> str:
    """Identifies one training of the drafter."""
    return hashlib.sha256((root / CARD).read_bytes()).hexdigest()[:16]


def _lock_of(making: Path) -> Path:
    """Beside the folder, which `add` renames."""
    return making.with_name(making.name + _LOCK)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path))
        except OSError as error:
            if isinstance(error, PermissionError) or error.errno == errno.EROFS:
                raise UsageError(
                    f"{path.parent.parent.name} lies where files cannot be written ({error.strerror}): "
                    "versions need that, so copy it to a folder of your own"
                ) from None
            raise UsageError(
                f"{path.parent.parent.name} lies where files cannot be locked ({error.strerror}): "
                "versions need that, so keep it on another volume"
            ) from None
        yield


def _way_back(root: Path) -> str:
    return f"`paceline drafters rollback {root.name} 0`"
