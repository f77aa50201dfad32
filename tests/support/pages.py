"""What may happen to a page of the disk tier."""

import os
from collections.abc import Callable
from pathlib import Path

from paceline.target.kv.disk_cache import PAGE
from paceline.target.kv.page_file import CHECKSUM, HEADER


def flip(at: int) -> Callable[[Path], None]:
    def damage(page: Path) -> None:
        data = bytearray(page.read_bytes())
        data[at] ^= 4
        page.write_bytes(data)

    return damage


def another(page: Path) -> None:
    """Under a name that is not its own, in place of this one."""
    other = next(path for path in sorted(page.parent.glob(f"*{PAGE}")) if path != page)
    page.write_bytes(other.read_bytes())


def linked(page: Path) -> None:
    page.rename(page.with_suffix(".away"))
    page.symlink_to(page.with_suffix(".away"))


def folder_instead(page: Path) -> None:
    page.unlink()
    page.mkdir()


def pipe_instead(page: Path) -> None:
    """Without a writer: whoever waits for one waits for ever."""
    page.unlink()
    os.mkfifo(page)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "magic": flip(3),
    "format": flip(20),
    "key": flip(60),
    "rows": flip(80),
    "checksum": flip(CHECKSUM + 5),
    "end of the header": flip(HEADER - 1),
    "first byte": flip(HEADER),
    "last byte": flip(-1),
    "cut": lambda page: os.truncate(page, 5000),
    "cut in its header": lambda page: os.truncate(page, 50),
    "empty": lambda page: os.truncate(page, 0),
    "longer": lambda page: os.truncate(page, page.stat().st_size + 1),
    "another page": another,
    "a link": linked,
    "gone": lambda page: page.unlink(),
    "a folder": folder_instead,
    "a pipe": pipe_instead,
}
