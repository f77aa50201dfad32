"""A store in use whose file is deleted, replaced or overwritten by someone else; and its end."""

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.errors import StoreError
from paceline.trace.recorder import Recorder
from paceline.trace.store import Store
from support.traces import a_request, rounds_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with closing(Store.open(str(path))) as opened:
        save(opened, "before")
        yield opened


def save(store: Store, id: str) -> None:
    store.save(a_request(id), rounds_of(a_request(id)))


def ids(path: Path) -> set[str]:
    """As another process reads them."""
    with closing(Store.open(str(path), create=False)) as other:
        return {record.id for record in other.list()}


def delete(path: Path) -> None:
    path.unlink()


def delete_all(path: Path) -> None:
    for file in path.parent.glob("traces.db*"):
        file.unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def truncate(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a database at all, and longer than a header of sixteen bytes" * 200)


def overwrite_the_middle(path: Path) -> None:
    """As a disk does. The log is moved into the file first, so that the pages are read from there."""
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(path.stat().st_size - 100))


def replace_by_text(path: Path) -> None:
    path.unlink()
    path.write_text("somebody's notes, which are longer than sixteen bytes")


@pytest.mark.parametrize(
    ("happens", "word"),
    [
        (delete, "deleted"),
        (delete_all, "deleted"),
        (delete_folder, "deleted"),
        (truncate, "overwritten"),
        (overwrite, "overwritten"),
        (overwrite_the_middle, "damaged"),
        (replace_by_text, "replaced"),
    ],
)
def test_a_new_store_begins_with_one_line_in_the_log(
    store: Store,
    path: Path,
    happens: Callable[[Path], None],
    word: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    happens(path)
    for id in ("first", "second"):
        save(store, id)
    assert ids(path) == {"first", "second"}
    (line,) = caplog.messages
    assert line.startswith(f"the trace store {path} was {word} while in use: a new one begins")


@pytest.mark.parametrize("happens", [overwrite, overwrite_the_middle, replace_by_text])
def test_what_took_its_place_is_set_aside(store: Store, path: Path, happens: Callable[[Path], None]) -> None:
    happens(path)
    content = path.read_bytes()
    save(store, "after")
    (aside,) = [file for file in path.parent.glob("traces.db.damaged-*") if file.name[-1].isdigit()]
    assert aside.read_bytes() == content


def test_another_store_in_its_place_is_used(store: Store, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with closing(Store.open(str(other))) as made:
        save(made, "old")
    delete_all(path)
    other.rename(path)
    save(store, "new")
    assert ids(path) == {"old", "new"}


def test_pruning_notices_it_too(store: Store, path: Path) -> None:
    delete_all(path)
    assert store.prune() == 0
    assert ids(path) == set()


def test_where_no_new_one_can_be_made_traces_are_counted_as_lost(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(store)
    delete_folder(path)
    path.parent.write_text("a file where the folder was")
    recorder.finished(a_request("lost"))
    assert recorder.close(timeout=60)
    assert recorder.lost() == {"dropped": 0, "failed": 1}
    assert all("\n" not in line for line in caplog.messages)
    path.parent.unlink()
    save(store, "later")  # as soon as it can be
    assert ids(path) == {"later"}


def test_a_new_store_is_not_taken_for_an_overwritten_one(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for id in ("a", "b"):
        with closing(Store.open(str(path))) as store, caplog.at_level(logging.INFO):
            save(store, id)
    assert ids(path) == {"a", "b"}
    assert caplog.messages == []


def test_after_a_clean_end_the_file_alone_holds_everything(path: Path, tmp_path: Path) -> None:
    """Also while somebody else has it open, who would otherwise keep the log."""
    with closing(Store.open(str(path))) as store:
        save(store, "a")
        reader = Store.open(str(path), create=False)
        assert reader.list()
    log = Path(f"{path}-wal")
    assert not log.exists() or log.stat().st_size == 0
    copy = tmp_path / "copy.db"
    shutil.copyfile(path, copy)
    assert ids(copy) == {"a"}
    reader.close()


def test_an_old_store_that_is_gone_is_still_an_error_for_readers(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no trace store"):
        Store.open(str(path), create=False)
