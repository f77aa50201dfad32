"""From a URL to an engine that is safe to write with. A file that is no trace store is left as it is."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, SQLAlchemyError

from paceline.errors import DamagedStore, StoreError
from paceline.paths import home
from paceline.trace.record import write_json
from paceline.trace.store.migrations import version

SQLITE_FIRST_BYTES = b"SQLite format 3\0"

MADE_BY = "`paceline serve` or `paceline gate serve`"

LOCK_WAIT_MS = 10_000  # for another writer

PRAGMAS = (
    f"busy_timeout = {LOCK_WAIT_MS}",
    "foreign_keys = ON",
    "auto_vacuum = INCREMENTAL",  # heeded while the file is empty: pruning can then shorten it
    "journal_mode = WAL",  # readers and the writer do not wait for each other
    "synchronous = NORMAL",  # a power cut may cost the last requests, never the file
    "journal_size_limit = 8388608",
)


def default_url() -> str:
    return str(home() / "traces.db")


def parse(url: str) -> URL:
    """A path, sqlite:///path or postgresql://user@host/database."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _file(url)
    if scheme == "sqlite":
        return _file(rest.removeprefix("/"))
    if scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        try:
            return make_url(url).set(drivername="postgresql+psycopg")
        except (ArgumentError, ValueError):
            raise StoreError("the store's URL cannot be read: expected postgresql://user@host/name") from None
    raise StoreError(f"a store cannot be at {scheme}://: expected a path, sqlite:///path or postgresql://...")


def _file(path: str) -> URL:
    if path in ("", ":memory:"):
        raise StoreError("a trace store is a file or a PostgreSQL database: name one")
    return URL.create("sqlite", database=str(Path(path).expanduser().absolute()))


def shown(url: URL) -> str:
    """A name for messages: a path, or a URL without its password."""
    return url.database or "" if url.drivername == "sqlite" else url.render_as_string(hide_password=True)


def engine(url: URL, create: bool, made_by: str = MADE_BY) -> Engine:
    """made_by: commands that make a store, for the error where there is none."""
    if url.drivername != "sqlite":
        return _postgres(url)
    path = Path(url.database or "")
    if path.exists() and (path.is_dir() or path.stat().st_size):
        _check_file(path)
    elif create:
        _make_private(path)
    else:
        raise StoreError(f"there is no trace store at {path}; {made_by} makes one")
    return _sqlite(url)


def _postgres(url: URL) -> Engine:
    wait = {} if "connect_timeout" in url.query else {"connect_timeout": 10}
    try:
        made = create_engine(
            url, connect_args=wait, pool_pre_ping=True, hide_parameters=True, json_serializer=write_json
        )
    except ModuleNotFoundError:
        raise StoreError("PostgreSQL needs a driver: pip install 'paceline[postgres]'") from None
    event.listen(made, "connect", _limit_waiting)
    return made


def _limit_waiting(connection: Any, _: object) -> None:
    connection.execute(f"SET lock_timeout = {LOCK_WAIT_MS}")
    connection.commit()


def _sqlite(url: URL) -> Engine:
    made = create_engine(url, hide_parameters=True, json_serializer=write_json)
    event.listen(made, "connect", _set_up)
    event.listen(made, "begin", _begin)
    return made


def _set_up(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # Python's sqlite3 begins nothing by itself: _begin does
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # A transaction that reads first and writes later would fail at once if another writes in between.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _check_file(path: Path) -> None:
    """Reads, and only reads, until it is sure that the file is a store."""
    try:
        with path.open("rb") as file:
            first = file.read(len(SQLITE_FIRST_BYTES))
    except OSError as error:
        raise StoreError(f"the store at {path} cannot be read: {error.strerror}") from None
    if first != SQLITE_FIRST_BYTES:
        raise StoreError(f"{path} is not a trace store, nor any SQLite file; give another path")
    reading = create_engine("sqlite://", creator=lambda: _read_only(path), poolclass=NullPool)
    with errors(f"the store at {path} cannot be used"), reading.connect() as connection:
        version(connection)


def _read_only(path: Path) -> sqlite3.Connection:
    # Without a log the file says all there is, and SQLite need not put a new log beside it.
    how = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"{path.as_uri()}?{how}", uri=True, timeout=10)


class WatchedFile:
    """The file of a store in use. SQLite goes on writing to one that was deleted, and never says so.

    It is looked at through a descriptor that stays open: closing any descriptor of a file drops the locks
    that SQLite holds on it in this process (POSIX advisory locks).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def problem(self) -> str | None:
        """The fate of the file, in a word; None: it is there, and a database."""
        try:
            there = os.stat(self.path)
        except OSError:
            return "deleted"
        if not os.path.samestat(there, os.fstat(self._descriptor)):
            return "replaced"
        first = os.pread(self._descriptor, len(SQLITE_FIRST_BYTES), 0)
        return None if first == SQLITE_FIRST_BYTES else "overwritten"

    def close(self) -> None:
        os.close(self._descriptor)


def set_aside(path: Path) -> Path:
    """Renames a store with its log, which must not be applied to a new file of that name."""
    aside = Path(f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


def _make_private(path: Path) -> None:
    """A file that only its owner may read; SQLite gives its helper files the same rights."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreError(f"a store cannot be made at {path}: {error.strerror}") from None


@contextmanager
def errors(what: str) -> Iterator[None]:
    """Turns what a database says into one line that quotes no value."""
    try:
        yield
    except StoreError as error:
        raise type(error)(f"{what}: {error}") from None
    except (SQLAlchemyError, OverflowError, TypeError, ValueError) as error:  # the latter: values of a record
        kind = DamagedStore if _is_damage(error) else StoreError
        raise kind(f"{what}: {_reason(error)}") from None


def _is_damage(error: Exception) -> bool:
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & 0xFF  # without its extension
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _reason(error: Exception) -> str:
    cause: Any = getattr(error, "orig", None) or error
    if isinstance(error, DataError) or not isinstance(error, DBAPIError):
        return type(cause).__name__  # its text may quote what was stored
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
