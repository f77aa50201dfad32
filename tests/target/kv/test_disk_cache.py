"""The disk tier: whatever happens to its folder, a page is read as it was written or not at all."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from paceline.atomic import locked
from paceline.target.kv import disk_cache
from paceline.target.kv.disk_cache import PAGE, DiskCache, clear, stored_models
from paceline.target.kv.page_file import (
    Bytes,
    PageFile,
    PageFormat,
    PageStatus,
    page_key,
    prefix_keys,
    root_key,
)
from support.pages import DAMAGES

BLOCK = 16
ROW = 512  # bytes
ON_DISK = 12288  # bytes of a whole page: 8,192 and a header, in sectors of 4,096
FORMAT = bytes(range(32))


def opened(folder: Path, pages: int = 100, format: bytes = FORMAT) -> DiskCache:
    """A tier for so many whole pages."""
    checked = PageFormat(format, lambda page: crc32(page.data))
    return DiskCache(folder, checked, pages * ON_DISK, lambda rows: rows * ROW, BLOCK, "toy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def content(key: bytes, rows: int = BLOCK) -> Bytes:
    """What a page of this key must hold."""
    return np.random.default_rng(list(key[:8])).integers(0, 256, rows * ROW, dtype=np.uint8)


def put(disk: DiskCache, tokens: Sequence[int], tenant: str = "") -> list[bytes]:
    """Offers the pages of these tokens, as a sequence does; gives the keys, the root's first."""
    whole = len(tokens) // BLOCK * BLOCK
    keys = disk.keys(tenant, tokens[:whole])
    for key in keys[1:]:
        offer(disk, key)
    if whole < len(tokens):
        keys.append(page_key(keys[-1], tokens[whole:]))
        offer(disk, keys[-1], len(tokens) - whole)
    disk.used(keys[1:])
    assert disk.flush()
    return keys


def offer(disk: DiskCache, key: bytes, rows: int = BLOCK) -> None:
    def fill(page: Bytes) -> None:
        page[:] = content(key, rows)

    disk.offer(key, rows, fill)


def read(disk: DiskCache, tokens: Sequence[int], tenant: str = "") -> int:
    """How many of the tokens are found, every one of them as it was written."""
    rows = 0
    pages, found = disk.find(disk.keys(tenant, ())[0], tokens), dict[int, Bytes]()

    def read_all(files: Sequence[PageFile]) -> list[PageStatus]:
        status = list[PageStatus]()
        for i, file in enumerate(files):
            page = np.zeros(file.nbytes, np.uint8)
            status.append(file.read(page))
            if status[i] == PageStatus.WHOLE:
                found[i] = page
        return status

    loaded = disk.load(pages, read_all)
    for index, page in enumerate(pages):
        right = index in found and np.array_equal(found[index], content(page.key, len(page.tokens)))
        assert index not in found or right, "another page, or a damaged one"
        assert right or index >= loaded
        rows += len(page.tokens) * (index < loaded)
    return rows


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/*{PAGE}"))


def bytes_in(folder: Path) -> int:
    """All files, finished or not."""
    return sum(
        -(-path.stat().st_size // 4096) * 4096 for path in folder.glob("*/*") if path.name != "about.json"
    )


TOKENS = list(range(100, 170))  # four blocks and six tokens


def test_pages_are_found_by_the_next_process(folder: Path) -> None:
    put(opened(folder), TOKENS)
    assert read(opened(folder), TOKENS) == 64  # six tokens are computed as fast as they are read
    assert read(opened(folder), TOKENS[:40]) == 32
    assert read(opened(folder), [*TOKENS[:40], 0, *TOKENS[41:]]) == 32
    assert read(opened(folder), TOKENS[1:]) == 0


def test_a_part_of_a_block_is_found_as_a_whole(folder: Path) -> None:
    put(opened(folder), TOKENS[:44])
    disk = opened(folder)
    assert read(disk, TOKENS[:60]) == 44
    assert read(disk, TOKENS[:44]) == 44
    assert read(disk, TOKENS[:43]) == 32


def test_a_page_belongs_to_its_tenant_its_format_and_all_tokens_before_it(folder: Path) -> None:
    disk = opened(folder)
    put(disk, TOKENS, "anna")
    assert read(disk, TOKENS, "anna") == 64
    assert read(disk, TOKENS, "bert") == read(disk, TOKENS) == 0
    assert read(opened(folder, format=FORMAT[::-1]), TOKENS, "anna") == 0
    keys = disk.keys("anna", TOKENS[:64])
    assert keys[0] == root_key(FORMAT, "anna")
    assert keys[1] == page_key(keys[0], TOKENS[:16]) == prefix_keys(keys[0], TOKENS[:16])[-1]
    others = {
        page_key(keys[0], TOKENS[:16][::-1]),
        page_key(keys[1], TOKENS[:16]),
        page_key(keys[0], TOKENS[:15]),
    }
    assert len({*keys, *others}) == len(keys) + 3


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_page_is_a_miss_and_is_written_again(folder: Path, damage: str) -> None:
    keys = put(opened(folder), TOKENS[:48])
    disk = opened(folder)
    DAMAGES[damage](folder / FORMAT.hex()[:32] / f"{keys[2].hex()}{PAGE}")
    assert read(disk, TOKENS[:48]) == 16
    assert disk.flush()
    if damage != "a folder":
        put(disk, TOKENS[:48])
        assert read(disk, TOKENS[:48]) == 48
    assert disk.stats.damaged == (0 if damage in ("gone", "a link") else 1)


def test_a_page_that_shrinks_while_it_is_read_is_a_miss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put(opened(folder), TOKENS[:16])
    disk, preadv = opened(folder), os.preadv

    def slow(file: int, buffers: Any, offset: int) -> int:
        os.truncate(folder / FORMAT.hex()[:32] / f"{keys[1].hex()}{PAGE}", 4000)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    assert read(disk, TOKENS[:16]) == 0


def test_pages_used_longest_ago_go_first_and_the_bound_holds(folder: Path) -> None:
    disk = opened(folder, pages=6)
    chains = [[i] * 32 for i in range(4)]
    for chain in chains[:3]:
        put(disk, chain)
    disk.used(disk.keys("", chains[0])[1:])
    assert disk.flush()
    put(disk, chains[3])
    assert [read(disk, chain) for chain in chains] == [32, 0, 32, 32]
    assert bytes_in(folder) == 6 * ON_DISK == disk.stats.bytes
    assert (disk.stats.pages, disk.stats.evicted) == (6, 2)


def test_the_end_of_a_prefix_goes_before_its_beginning(folder: Path) -> None:
    disk = opened(folder, pages=6)
    put(disk, TOKENS[:64])
    put(disk, [7] * 64)
    assert read(disk, TOKENS) == 32
    assert read(disk, [7] * 64) == 64


def test_a_smaller_bound_holds_from_the_start(folder: Path) -> None:
    put(opened(folder, pages=8), list(range(128)))
    disk = opened(folder, pages=3)
    assert disk.flush()
    assert bytes_in(folder) == 3 * ON_DISK
    assert read(disk, list(range(128))) == 48
    small = opened(folder, pages=0)
    put(small, [5] * 16)
    assert not files(folder)
    assert small.stats.dropped == 1


def test_two_processes_share_the_folder_and_its_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "REFRESH_S", 0.0)
    one, two = opened(folder, pages=5), opened(folder, pages=5)
    for i in range(6):
        put((one, two)[i % 2], [i] * 32)
        assert bytes_in(folder) <= 5 * ON_DISK
        assert read(one, [i] * 32) == read(two, [i] * 32) == 32
    two.used(two.keys("", [4] * 32)[1:])
    assert two.flush()
    put(one, [9] * 32)  # which learns from the files what the other one has used
    assert read(one, [4] * 32) == read(two, [4] * 32) == 32
    assert read(one, [5] * 32) < 32


def test_a_full_disk_costs_pages_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = opened(folder)
    put(disk, TOKENS[:32])
    writev = os.writev

    def full(file: int, buffers: Any) -> int:
        if os.fstat(file).st_size > 2000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(file, [buffers[0], buffers[1][:3000]])

    monkeypatch.setattr(os, "writev", full)
    put(disk, [1] * 48)
    assert len(list(folder.glob("*/*"))) == 3  # no part of a file is left
    assert disk.stats.dropped == 3
    monkeypatch.setattr(os, "writev", writev)
    put(disk, [2] * 16)
    assert disk.stats.dropped == 4  # it is not tried again at once
    assert read(disk, TOKENS) == 32
    disk._writer._retry_at = 0.0
    put(disk, [1] * 48)
    assert read(disk, [1] * 48) == 48


def batches(disk: DiskCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages are written at a time, from now on."""
    writer, sizes = disk._writer, list[int]()
    change_files = writer._change_files

    def noted(writes: Sequence[Any], removed: Sequence[bytes]) -> None:
        sizes.append(len(writes))
        change_files(writes, removed)

    monkeypatch.setattr(writer, "_change_files", noted)
    return sizes


def test_pages_are_written_when_no_more_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "PAUSE_S", 600.0)
    disk = opened(folder)
    sizes = batches(disk, monkeypatch)
    for key in disk.keys("", range(6 * BLOCK))[1:]:
        offer(disk, key)
    assert disk.flush(60.0)  # does not wait for the pause
    assert sizes == [6]
    monkeypatch.setattr(disk_cache, "PAUSE_S", 0.001)
    offer(disk, disk.keys("other", range(BLOCK))[1])
    wait_for(lambda: disk.stats.written == 7)


def test_a_page_waits_for_those_that_follow_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_cache.PAUSE_S >= 0.1  # a prompt's next block is computed in less, and would share its core
    monkeypatch.setattr(disk_cache, "PAUSE_S", 600.0)
    disk = opened(folder)
    assert disk.flush(60.0)
    change, waits = disk._writer._change, list[float | None]()
    wait = change.wait_for

    def noted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(predicate, timeout)

    monkeypatch.setattr(change, "wait_for", noted)
    offer(disk, disk.keys("", range(BLOCK))[1])
    wait_for(lambda: 600.0 in waits or disk.stats.written == 1)
    assert (600.0 in waits, disk.stats.written) == (True, 0)
    assert disk.flush(60.0)


def test_pages_are_written_at_once_when_many_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "PAUSE_S", 600.0)
    monkeypatch.setattr(disk_cache, "QUEUE_BYTES", 8 * BLOCK * ROW)
    disk = opened(folder)
    keys = disk.keys("", range(6 * BLOCK))[1:]
    for key in keys:
        offer(disk, key)
    wait_for(lambda: disk.stats.written == 6)
    offer(disk, disk.keys("other", range(BLOCK))[1])
    disk.close()  # nor does the end of the process wait
    assert len(files(folder)) == 7


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_slow_disk_drops_pages_and_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "QUEUE_BYTES", 5 * BLOCK * ROW)
    disk = opened(folder)
    assert disk.flush()
    with locked(folder / ".lock"):  # as another process that is stuck
        keys = disk.keys("", list(range(320)))
        for key in keys[1:]:
            offer(disk, key)
        assert not disk.flush(0.01)
        assert disk.stats.dropped == 15
    assert disk.flush()
    assert disk.stats.written == 5
    assert read(disk, list(range(320))) == 80


def test_folders_that_are_removed_while_it_runs_are_made_again(folder: Path) -> None:
    disk = opened(folder)
    put(disk, TOKENS[:32])
    for path in sorted(folder.glob("**/*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert read(disk, TOKENS) == 0
    put(disk, TOKENS[:32])
    assert read(disk, TOKENS) == 32


def test_only_the_owner_can_read_pages(folder: Path) -> None:
    before = os.umask(0)
    try:
        put(opened(folder), TOKENS)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.glob("*"), *files(folder))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {modes[page] for page in files(folder)} == {0o600}


def test_pages_and_folders_of_another_user_are_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(opened(folder), TOKENS[:32])
    disk, user = opened(folder), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert read(disk, TOKENS) == 0
    with pytest.raises(PermissionError, match="another user"):
        opened(folder)


def test_pages_are_listed_and_cleared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "REFRESH_S", 0.0)
    assert (stored_models(folder), clear(folder)) == ([], 0)
    disk, other = opened(folder), opened(folder, format=FORMAT[::-1])
    put(disk, TOKENS[:32])
    put(other, TOKENS[:48])
    assert [(m.model, m.pages, m.bytes) for m in stored_models(folder)] == [
        ("toy", 3, 3 * ON_DISK),
        ("toy", 2, 2 * ON_DISK),
    ]
    assert clear(folder, "another") == clear(folder, weights="another") == 0
    assert clear(folder) == 5
    assert not files(folder)
    assert read(disk, TOKENS) == 0
    put(disk, TOKENS[:32])
    assert read(disk, TOKENS) == 32


WRITER = """
import os
import sys
import time
from pathlib import Path
sys.path[:0] = {paths!r}
from test_disk_cache import opened, offer, BLOCK

def slow(file, buffers):  # so that most kills cut a page
    time.sleep(0.0005)
    return os.write(file, buffers[0][:1024])

os.writev = slow
disk, number = opened(Path({folder!r}), pages=40), int({first!r})
print("ready", flush=True)
while True:
    for key in disk.keys("", [number] * BLOCK * 4)[1:]:
        offer(disk, key)
    disk.used(disk.keys("", [number] * BLOCK * 4)[1:])
    disk.flush()
    number += 1
"""


def writers(folder: Path, first: int) -> Iterator["subprocess.Popen[str]"]:
    paths = [str(Path(__file__).parent), *sys.path]
    for i in range(2):
        code = WRITER.format(paths=paths, folder=str(folder), first=str(first + 10**6 * i))
        yield subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_writers_that_are_killed_leave_whole_pages_within_the_bound(folder: Path) -> None:
    """Two processes at once, kill -9 at any moment, three times over."""
    random, largest, left = Random(0), 0, 0
    for turn in range(3):
        running = list(writers(folder, 10**4 * turn))
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for _ in range(20 + random.randrange(10)):
            largest = max(largest, bytes_in_full(folder))
        time.sleep(random.random() / 50)  # so that any of them may hold the lock
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
        left += len(list(folder.glob("*/*.new")))
        disk = opened(folder, pages=40)
        assert disk.flush()
        assert not list(folder.glob("*/*.new"))
        for page in files(folder):
            key = bytes.fromhex(page.stem)
            found = np.zeros(BLOCK * ROW, np.uint8)
            assert disk._format.file(str(page), key, BLOCK, len(found)).read(found) == PageStatus.WHOLE
            assert np.array_equal(found, content(key))
    assert largest <= 40 * ON_DISK
    assert left  # some were killed while they wrote


def bytes_in_full(folder: Path) -> int:
    """Once it is more than half full, while nobody adds or removes a page."""
    total = 0
    while total <= 20 * ON_DISK:
        with locked(folder / ".lock"):
            total = bytes_in(folder)
    return total
