"""The trace store as a file: what it refuses, and that a crash costs nothing that was saved."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from paceline.errors import StoreError
from paceline.trace.store import Store, default_url
from support import TESTS
from support.traces import a_request, rounds_of

HERE = Path(__file__).parent


def make_store(path: Path, requests: int = 3) -> None:
    with closing(Store.open(str(path))) as store:
        for i in range(requests):
            store.save(a_request(f"r{i}"), rounds_of(a_request(f"r{i}")))


def sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def text_file(path: Path) -> None:
    path.write_text("not a database at all, and longer than a header of sixteen bytes")


def others_database(path: Path) -> None:
    sql(path, "PRAGMA journal_mode = WAL", "CREATE TABLE bookmarks (url TEXT)")


def damaged_head(path: Path) -> None:
    make_store(path)
    path.write_bytes(path.read_bytes()[:100] + os.urandom(8000))


def truncated(path: Path) -> None:
    make_store(path, 200)
    path.write_bytes(path.read_bytes()[:5000])


def newer(path: Path) -> None:
    make_store(path)
    sql(path, "UPDATE paceline_schema_version SET version = 99")


def versionless(path: Path) -> None:
    make_store(path)
    sql(path, "DELETE FROM paceline_schema_version")


@pytest.mark.parametrize("make", [text_file, others_database, damaged_head, truncated, newer, versionless])
def test_a_file_that_is_no_store_of_ours_is_refused_untouched(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "traces.db"
    make(path)
    before, files = path.read_bytes(), sorted(os.listdir(tmp_path))
    with pytest.raises(StoreError) as caught:
        Store.open(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == files


def test_damage_inside_is_a_store_error_when_it_is_met(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    make_store(path, 300)
    whole = bytearray(path.read_bytes())
    whole[131_072:] = os.urandom(len(whole) - 131_072)
    path.write_bytes(whole)
    with closing(Store.open(str(path))) as store, pytest.raises(StoreError):
        list(store.export())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://here/traces", "cannot be at mysql://"),
        ("", "name one"),
        (":memory:", "name one"),
        ("sqlite://", "name one"),
        ("postgresql://here:port/traces", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        Store.open(url or "sqlite:///")


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    text_file(tmp_path / "file")
    for path in (tmp_path, tmp_path / "file" / "traces.db"):
        with pytest.raises(StoreError, match=str(tmp_path)):
            Store.open(str(path))
    with pytest.raises(StoreError, match="no trace store at"):
        Store.open(str(tmp_path / "none.db"), create=False)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("limits", [{"max_mb": 0}, {"max_age_days": -1}])
def test_limits_that_keep_nothing_are_refused(tmp_path: Path, limits: dict[str, float]) -> None:
    with pytest.raises(StoreError, match="above 0"):
        Store.open(str(tmp_path / "traces.db"), **limits)  # type: ignore[arg-type]


def test_the_file_is_made_at_its_path_and_only_its_owner_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    places = {
        None: Path(default_url()),
        str(tmp_path / "a ?#%.db"): tmp_path / "a ?#%.db",
        f"sqlite:///{tmp_path}/b.db": tmp_path / "b.db",
        "sqlite:///deep/c.db": tmp_path / "deep" / "c.db",
    }
    for url, path in places.items():
        with closing(Store.open(url)) as store:
            store.save(a_request("r"), ())
            files = list(path.parent.glob(f"{path.name}*"))
            assert len(files) == 3  # the database, its log, the log's index
            assert {f.stat().st_mode & 0o777 for f in files} == {0o600}
        with closing(Store.open(url)) as store:
            assert store.get("r")
    assert Path(default_url()) == tmp_path / "home" / "traces.db"


def test_writes_ahead_and_checks_keys(tmp_path: Path) -> None:
    with closing(Store.open(str(tmp_path / "t.db"))) as store, store._engine.connect() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "auto_vacuum", "busy_timeout")
        }
    assert found == {
        "journal_mode": "wal",
        "synchronous": 1,  # NORMAL
        "foreign_keys": 1,
        "auto_vacuum": 2,  # INCREMENTAL
        "busy_timeout": 10_000,
    }


def test_the_first_version_is_still_read(tmp_path: Path) -> None:
    """The dump was written by version 1 and stays as it is."""
    path = tmp_path / "traces.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((HERE / "store_v1.sql").read_text())
    with closing(Store.open(str(path))) as store:
        assert store.get("r0") == (a_request("r0"), rounds_of(a_request("r0")))


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from support.traces import a_request, rounds_of
from paceline.trace.store import Store
store = Store.open(sys.argv[1], max_mb=0.5)
for i in range(100_000):
    record = a_request(f"r{i}", created=2e9 + i, passes=40)
    store.save(record, rounds_of(record))
    print(i, flush=True)
    if i % 50 == 49:
        store.prune()
        print(f"pruned {i}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 37, 120])
def test_a_writer_killed_leaves_every_saved_request_whole(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "traces.db"
    command = [sys.executable, "-c", WRITER, str(path), str(TESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        for _ in range(lines):
            said = writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        said = ([said, *writer.stdout.readlines()])[-1]  # it may have gone on meanwhile
    assert writer.returncode == -signal.SIGKILL
    last = int(said.split()[-1])
    with closing(Store.open(str(path))) as store:
        found = list(store.export())
        numbers = [int(request["id"][1:]) for request in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert numbers[0] == 0 or last >= 49  # nothing is missing but what was pruned
        assert numbers[-1] in (last, last + 1)  # killed between the commit and the word
        assert all(len(request["rounds"]) == 40 for request in found)
        store.save(a_request("after"), ())
        with store._engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
