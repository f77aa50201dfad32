"""The trace store: saves requests and rounds, and deletes those that are too old or too many."""

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

from sqlalchemy import URL, Connection, Engine, and_, delete, func, insert, literal, or_, select, text
from sqlalchemy.exc import SQLAlchemyError

from paceline.errors import DamagedStore, StoreError
from paceline.trace.record import RequestRecord, RoundRecord, RoundTiming, as_dict
from paceline.trace.store import connect
from paceline.trace.store.migrations import latest, migrate, version
from paceline.trace.store.schema import (
    REQUESTS,
    ROUNDS,
    SUMMARY,
    AnyText,
    request_of,
    request_row,
    round_of,
    round_row,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 64  # requests an export holds in memory
BATCH = 500  # requests deleted in one transaction
ROOM = 0.9  # pruning by size goes down to this share, so that it is seldom needed

MAX_TURNS = 512  # of a conversation, that are read at once

StoredRequest = tuple[RequestRecord, tuple[RoundRecord, ...]]
TimedRequest = tuple[RequestRecord, Sequence[RoundTiming]]


class Store:
    """Safe to use from several threads and processes at once. Every failure is a StoreError."""

    _engine: Engine
    _writing: Engine  # its transactions begin with the lock of a writer

    def __init__(self, url: URL, max_age_days: float, max_mb: float) -> None:
        self._url = url
        self._max_age_s = max_age_days * 86400
        self._max_bytes = int(max_mb * 1e6)
        self._renewing = Lock()
        self._file: connect.WatchedFile | None = None  # of SQLite
        self.name = connect.shown(url)

    @classmethod
    def open(
        cls,
        url: str | None = None,
        *,
        max_age_days: float = 30,
        max_mb: float = 512,
        create: bool = True,
        made_by: str = connect.MADE_BY,
    ) -> "Store":
        """Makes or updates the tables first, if that is needed. made_by: see `connect.engine`."""
        if max_age_days <= 0 or max_mb <= 0:
            raise StoreError("a store keeps something: expected max_age_days and max_mb above 0")
        store = cls(connect.parse(url or connect.default_url()), max_age_days, max_mb)
        store._open(create, made_by)
        return store

    def _open(self, create: bool, made_by: str = connect.MADE_BY) -> None:
        self._engine = _patiently(lambda: connect.engine(self._url, create, made_by))
        self._writing = self._engine.execution_options(writes=True)
        try:
            _patiently(self._make_current)
        except StoreError:
            self._engine.dispose()
            raise
        if self._engine.dialect.name == "sqlite":
            self._file = connect.WatchedFile(Path(self._url.database or ""))

    def _renew_if_gone(self) -> None:
        """Begins a new store if the file was deleted or overwritten by someone else."""
        with self._renewing:
            if self._file is not None and (problem := self._file.problem()) is not None:
                self._renew(self._file, problem)

    def _renew(self, file: connect.WatchedFile, problem: str) -> None:
        aside = (
            ""
            if problem in ("deleted", "replaced")
            else f", {connect.set_aside(file.path).name} has the rest"
        )
        self._engine.dispose()
        try:
            self._open(create=True)
        except StoreError:
            if problem != "replaced":
                raise
            aside = f", {connect.set_aside(file.path).name} is what took its place"
            self._open(create=True)
        file.close()
        log.warning("the trace store %s was %s while in use: a new one begins%s", self.name, problem, aside)

    def _make_current(self) -> None:
        with connect.errors(f"the store at {self.name} cannot be used"):
            with self._engine.begin() as connection:
                stored = version(connection)
            if stored != latest():
                with self._writing.begin() as connection:
                    migrate(connection)

    @contextmanager
    def transaction(self, purpose: str, writes: bool = False) -> Iterator[Connection]:
        """For tables that have their own code. purpose: begins the message of an error."""
        if writes:
            self._renew_if_gone()
        with connect.errors(purpose), (self._writing if writes else self._engine).begin() as connection:
            yield connection

    def save(self, record: RequestRecord, rounds: Sequence[RoundRecord]) -> None:
        """All of it or nothing. An id is saved once."""
        self._renew_if_gone()
        try:
            self._save(record, rounds)
        except DamagedStore:
            with self._renewing:
                if self._file is None:
                    raise
                self._renew(self._file, "damaged")
            self._save(record, rounds)

    def _save(self, record: RequestRecord, rounds: Sequence[RoundRecord]) -> None:
        with connect.errors("a request cannot be saved"), self._writing.begin() as connection:
            made = connection.execute(insert(REQUESTS).values(request_row(record)).returning(REQUESTS.c.key))
            key = made.scalar_one()
            if rounds:
                connection.execute(insert(ROUNDS), [round_row(r, key) for r in rounds])

    def list(
        self,
        limit: int = 20,
        before: str | None = None,
        model: str | None = None,
        route: str | None = None,
        finish: str | None = None,
        client: str | None = None,
        since: float | None = None,
    ) -> tuple[RequestRecord, ...]:
        """Newest first, without their text. before: the id of the last one seen. since: unix seconds."""
        filters = {"model": model, "route": route, "finish": finish, "client": client}
        query = select(*SUMMARY).where(*(REQUESTS.c[k] == v for k, v in filters.items() if v is not None))
        query = query.order_by(REQUESTS.c.created.desc(), REQUESTS.c.key.desc()).limit(limit)
        if since is not None:
            query = query.where(REQUESTS.c.created >= since)
        with connect.errors("requests cannot be listed"), self._engine.begin() as connection:
            if before is not None:
                query = query.where(_older_than(connection, before))
            return tuple(request_of(row) for row in connection.execute(query).mappings())

    def get(self, id: str, exact: bool = False) -> StoredRequest | None:
        """A request by its id, or unless `exact` by the beginning of it if only one begins so."""
        with connect.errors("a request cannot be read"), self._engine.begin() as connection:
            key = _key(connection, id, exact)
            if key is None:
                return None
            (stored,) = _whole(connection, [key])
            return stored

    def conversation(self, name: str, limit: int = MAX_TURNS) -> tuple[TimedRequest, ...]:
        """The latest requests of a conversation, oldest first. Of their text only the outputs."""
        query = select(*SUMMARY, REQUESTS.c.output).where(REQUESTS.c.conversation == name)
        query = query.order_by(REQUESTS.c.created.desc(), REQUESTS.c.key.desc()).limit(limit)
        with connect.errors("a conversation cannot be read"), self._engine.begin() as connection:
            rows = connection.execute(query).mappings().all()[::-1]
            timings = _timings(connection, [row["key"] for row in rows])
        return tuple((request_of(row), timings[row["key"]]) for row in rows)

    def export(self, since: float | None = None) -> Iterator[dict[str, Any]]:
        """One JSON object for each request, with its rounds, in the order they were saved."""
        last = 0
        recent = [] if since is None else [REQUESTS.c.created >= since]
        query = select(REQUESTS.c.key).order_by(REQUESTS.c.key).limit(PAGE)
        while True:
            with connect.errors("requests cannot be read"), self._engine.begin() as connection:
                keys = connection.execute(query.where(REQUESTS.c.key > last, *recent)).scalars().all()
                page = _whole(connection, keys)
            if not keys:
                return
            yield from (as_dict(record, rounds) for record, rounds in page)
            last = keys[-1]

    def prune(self) -> int:
        """Deletes requests past their age, then the oldest until the rest fits. Returns their number."""
        self._renew_if_gone()
        with connect.errors("old requests cannot be deleted"):
            gone = self._delete_older(time.time() - self._max_age_s)
            if gone and self._engine.dialect.name == "sqlite":  # PostgreSQL reuses the space by itself
                self._give_back()
            return gone + self._delete_until_it_fits()

    def size(self) -> int:
        """Bytes on disk. SQLite's log, which is short, comes on top."""
        with connect.errors("the size cannot be read"), self._engine.begin() as connection:
            if connection.dialect.name == "sqlite":
                pages = connection.execute(text("PRAGMA page_count")).scalar_one()
                return int(pages * connection.execute(text("PRAGMA page_size")).scalar_one())
            size = func.pg_total_relation_size
            return int(connection.execute(select(size(REQUESTS.name) + size(ROUNDS.name))).scalar_one())

    def close(self) -> None:
        """Moves SQLite's log into the file first, so that the file alone holds everything."""
        if self._file is not None and self._file.problem() is None:
            with suppress(SQLAlchemyError), self._engine.connect() as connection:
                raw = cast(sqlite3.Connection, connection.connection.driver_connection)
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._engine.dispose()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _delete_older(self, than: float) -> int:
        gone = 0
        while n := self._delete_oldest(BATCH, than):
            gone += n
        return gone

    def _delete_until_it_fits(self) -> int:
        gone = 0
        if self.size() <= self._max_bytes:
            return gone
        self._give_back()  # else what was deleted before would count still, and more would go for it
        size = self.size()
        while size > self._max_bytes:
            with self._engine.begin() as connection:
                count = connection.execute(select(func.count()).select_from(REQUESTS)).scalar_one()
            goal = gone + math.ceil(count * (1 - ROOM * self._max_bytes / size))
            while gone < goal and (n := self._delete_oldest(min(BATCH, goal - gone))):
                gone += n
            self._give_back()
            size, before = self.size(), size
            if size >= before:  # someone still reads what was deleted: more deleting would not help
                break
        return gone

    def _delete_oldest(self, limit: int, than: float = math.inf) -> int:
        oldest = select(REQUESTS.c.key).order_by(REQUESTS.c.created, REQUESTS.c.key).limit(limit)
        if than < math.inf:
            oldest = oldest.where(REQUESTS.c.created < than)
        with self._writing.begin() as connection:
            return connection.execute(delete(REQUESTS).where(REQUESTS.c.key.in_(oldest))).rowcount

    def _give_back(self) -> None:
        """Returns the room of deleted requests to the disk."""
        if self._engine.dialect.name == "sqlite":
            with self._engine.connect() as connection:
                raw = cast(sqlite3.Connection, connection.connection.driver_connection)
                raw.executescript("PRAGMA incremental_vacuum")  # execute() would free a single page
            return
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(f"VACUUM (FULL) {REQUESTS.name}, {ROUNDS.name}")


def _older_than(connection: Connection, id: str) -> Any:
    position = select(REQUESTS.c.created, REQUESTS.c.key).where(REQUESTS.c.id == id)
    stored = connection.execute(position).one_or_none()
    if stored is None:
        raise StoreError(f"there is no request {id!r} to list those before it")
    created, key = stored
    earlier = REQUESTS.c.created < created
    return or_(earlier, and_(REQUESTS.c.created == created, REQUESTS.c.key < key))


def _key(connection: Connection, id: str, exact: bool) -> int | None:
    whole = connection.execute(select(REQUESTS.c.key).where(REQUESTS.c.id == id)).scalar()
    if whole is not None or exact or not id:
        return whole
    # Not LIKE, which in SQLite takes upper and lower case for the same.
    start = literal(id, AnyText)
    begins = func.substr(REQUESTS.c.id, 1, func.length(start)) == start
    keys = connection.execute(select(REQUESTS.c.key).where(begins).limit(2)).scalars().all()
    if len(keys) > 1:
        raise StoreError(f"more than one request begins with {id!r}; give more of the id")
    return keys[0] if keys else None


def _whole(connection: Connection, keys: Sequence[int]) -> Sequence[StoredRequest]:
    """The requests with these keys, in order of key, and the rounds of each."""
    rounds: dict[int, list[Any]] = {key: [] for key in keys}
    query = (
        select(ROUNDS).where(ROUNDS.c.request_key.in_(keys)).order_by(ROUNDS.c.request_key, ROUNDS.c.index)
    )
    for row in connection.execute(query).mappings():
        rounds[row["request_key"]].append(row)
    requests = select(REQUESTS).where(REQUESTS.c.key.in_(keys)).order_by(REQUESTS.c.key)
    return [
        (request_of(row), tuple(round_of(r, row["id"]) for r in rounds[row["key"]]))
        for row in connection.execute(requests).mappings()
    ]


def _timings(connection: Connection, keys: Sequence[int]) -> dict[int, list[RoundTiming]]:
    timings: dict[int, list[RoundTiming]] = {key: [] for key in keys}
    columns = (ROUNDS.c[name] for name in ("request_key", *RoundTiming._fields))
    query = (
        select(*columns)
        .where(ROUNDS.c.request_key.in_(keys))
        .order_by(ROUNDS.c.request_key, ROUNDS.c["index"])
    )
    for key, *timing in connection.execute(query):
        timings[key].append(RoundTiming(*timing))
    return timings


def _patiently(act: Callable[[], T]) -> T:
    """While another makes the file a log, SQLite does not wait for it as it does for any other lock."""
    late = time.monotonic() + connect.LOCK_WAIT_MS / 1000
    while True:
        try:
            return act()
        except StoreError as error:
            if "database is locked" not in str(error) or time.monotonic() > late:
                raise
        time.sleep(0.02)
