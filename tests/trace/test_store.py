"""The trace store on both databases: the same promises, the same tests."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from paceline.errors import StoreError
from paceline.trace.record import RequestRecord, RoundRecord
from paceline.trace.store import Store, connect, migrations
from support import examples, traces
from support.traces import NOW, a_request, a_round, any_request, any_round, rounds_of

pytestmark = pytest.mark.slow

Places = Callable[[], str]  # a new URL each time


@pytest.fixture(params=["sqlite", "postgres"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    if request.param == "sqlite":
        return lambda: str(tmp_path / f"{uuid4().hex}.db")
    server: str = request.getfixturevalue("postgres")

    return lambda: new_database(server)


def new_database(server: str) -> str:
    name = f"t{uuid4().hex}"
    traces.execute(server.format("postgres"), f"CREATE DATABASE {name}")
    return server.format(name)


@pytest.fixture
def url(places: Places) -> str:
    return places()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(Store.open(url)) as opened:
        yield opened


def save(store: Store, *records: RequestRecord) -> None:
    for record in records:
        store.save(record, rounds_of(record))


def ids(store: Store) -> list[str]:
    return [r.id for r in store.list(limit=10_000)]


def test_what_was_saved_is_found_again_after_reopening(url: str) -> None:
    record = a_request("r1", messages=[{"role": "user", "content": "hé\0"}], output="\ud800 \\u0041 \\")
    with closing(Store.open(url)) as first:
        save(first, record)
    with closing(Store.open(url)) as second:
        assert second.get("r1") == (record, rounds_of(record))
        assert second.list() == (replace(record, messages=None, output=None),)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(record=any_request, rounds=st.lists(any_round, max_size=3))
def test_any_record_comes_back_as_it_was(
    store: Store, record: RequestRecord, rounds: list[RoundRecord]
) -> None:
    record = replace(record, id=uuid4().hex + record.id)
    own = tuple(replace(r, request=record.id, index=i) for i, r in enumerate(rounds))
    store.save(record, own)
    assert store.get(record.id) == (record, own)
    assert store.list(1, model=record.model, route=record.route, finish=record.finish)


def test_lists_newest_first_and_filters(store: Store) -> None:
    save(store, *(a_request(f"r{i}", created=NOW + i) for i in range(4)))
    save(store, a_request("other", model="qwen", route="", finish="error", created=NOW - 1))
    assert ids(store) == ["r3", "r2", "r1", "r0", "other"]
    assert [r.id for r in store.list(2)] == ["r3", "r2"]
    for only in ({"model": "qwen"}, {"route": ""}, {"finish": "error"}):
        assert [r.id for r in store.list(**only)] == ["other"]  # type: ignore[arg-type]
    assert store.list(model="' OR 1=1 --") == ()


def test_pages_miss_nothing_though_times_are_equal(store: Store) -> None:
    save(store, *(a_request(f"r{i}", created=NOW + i // 4) for i in range(11)))
    seen: list[str] = []
    while page := store.list(3, before=seen[-1] if seen else None):
        seen += [r.id for r in page]
    assert seen == ids(store)
    assert len(seen) == 11
    with pytest.raises(StoreError, match="no request 'gone'"):
        store.list(before="gone")


def test_an_id_may_be_shortened_while_it_is_unique(store: Store) -> None:
    save(store, *(a_request(id) for id in ("abc1", "abc2", "abc", "ABC", "x%y", "x_z", "back\\slash")))
    for given_id, meant in {
        "abc1": "abc1",
        "abc": "abc",
        "AB": "ABC",
        "x%": "x%y",
        "back\\": "back\\slash",
    }.items():
        found = store.get(given_id)
        assert found is not None
        assert found[0].id == meant
    assert store.get("c") is None
    assert store.get("") is None
    with pytest.raises(StoreError, match="more than one"):
        store.get("ab")


def test_an_id_is_saved_once_and_a_failure_leaves_nothing(store: Store) -> None:
    record = a_request("r1")
    save(store, record)
    with pytest.raises(StoreError, match="cannot be saved"):
        store.save(replace(record, model="second"), ())
    twice = [a_round("r2", 0), a_round("r2", 0)]
    with pytest.raises(StoreError):
        store.save(a_request("r2"), twice)
    assert ids(store) == ["r1"]
    assert store.get("r1") == (record, rounds_of(record))


@pytest.mark.parametrize(
    "bad", [{"params": {"x": float("nan")}}, {"passes": 2**63}, {"params": {"x": object()}}]
)
def test_an_error_quotes_nothing_of_the_request(store: Store, bad: dict[str, object]) -> None:
    with pytest.raises(StoreError) as caught:
        store.save(a_request("r1", prompt="SECRET", error="SECRET", **bad), ())
    assert "SECRET" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert "\n" not in str(caught.value)
    assert ids(store) == []


def test_export_gives_json_in_order_and_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.trace.store.store.PAGE", 4)
    save(store, *(a_request(f"r{i}", created=NOW + i) for i in range(10)))
    lines = [json.dumps(r) for r in store.export()]
    assert [json.loads(line)["id"] for line in lines] == [f"r{i}" for i in range(10)]
    assert len(json.loads(lines[0])["rounds"]) == 8
    assert [r["id"] for r in store.export(since=NOW + 8)] == ["r8", "r9"]
    running = store.export()
    next(running)
    save(store, a_request("late"))  # nothing is locked meanwhile
    assert [r["id"] for r in running][-1] == "late"


def test_prune_by_age(url: str) -> None:
    with closing(Store.open(url, max_age_days=2)) as store:
        day, now = 86400, time.time()
        save(store, *(a_request(f"{age} days", created=now - age * day) for age in (5, 3, 1, 0)))
        assert store.prune() == 2
        assert ids(store) == ["0 days", "1 days"]
        assert store.prune() == 0


def test_prune_by_size_takes_the_oldest_and_no_more_than_needed(url: str) -> None:
    limit = 2_000_000
    with closing(Store.open(url, max_mb=limit / 1e6)) as store:
        now = time.time()
        for i in range(120):
            save(store, a_request(f"r{i}", created=now - i, prompt=os.urandom(15_000).hex(), passes=20))
        assert store.size() > 1.5 * limit
        gone = store.prune()
        assert gone < 80
        assert 0.5 * limit < store.size() <= limit
        assert ids(store) == [f"r{i}" for i in range(120 - gone)]
        assert all(len(request["rounds"]) == 20 for request in store.export())
        assert store.prune() == 0


def test_a_store_that_cannot_be_small_enough_ends_empty(url: str) -> None:
    with closing(Store.open(url, max_mb=0.001)) as store:
        save(store, *(a_request(f"r{i}", prompt="x" * 50_000) for i in range(20)))
        assert store.prune() > 0
        assert len(ids(store)) <= 1


def test_nothing_is_deleted_while_its_room_cannot_be_had(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "LOCK_WAIT_MS", 100)
    url = new_database(postgres)
    with closing(Store.open(url, max_mb=0.05)) as store:
        save(store, *(a_request(f"r{i}", created=time.time()) for i in range(20)))
        with psycopg.connect(url) as reader:
            reader.execute("SELECT id FROM paceline_requests")
            with pytest.raises(StoreError, match="lock timeout"):
                store.prune()
            assert len(ids(store)) == 20
        assert store.prune() > 0


def test_readers_see_whole_requests_while_others_write(url: str) -> None:
    done = threading.Event()

    def write(name: str) -> None:
        with closing(Store.open(url)) as store:
            save(store, *(a_request(f"{name}-{i}") for i in range(40)))

    def read(_: int) -> int:
        looks = 0
        with closing(Store.open(url)) as store:
            while not done.is_set() or not looks:
                for request in store.export():
                    assert len(request["rounds"]) == request["passes"] == 8
                looks += 1
        return looks

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read, i) for i in range(2)]
        for writer in [pool.submit(write, f"w{i}") for i in range(4)]:
            writer.result(60)
        done.set()
        assert all(reader.result(60) for reader in readers)
    with closing(Store.open(url)) as store:
        assert len(ids(store)) == 160


def add_a_column(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE paceline_requests ADD COLUMN mood TEXT DEFAULT 'calm'"))


def add_a_column_and_fail(connection: Connection) -> None:
    add_a_column(connection)
    connection.execute(text("SELECT nothing FROM nowhere"))


def stored_version(url: str) -> int | None:
    with connect.engine(connect.parse(url), create=False).begin() as connection:
        found = connection.execute(text("SELECT version FROM paceline_schema_version")).scalar()
        return None if found is None else int(found)


def test_an_older_store_is_migrated_and_a_newer_one_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store.open(url)) as store:
        save(store, a_request("old"))
    assert stored_version(url) == migrations.latest()
    with monkeypatch.context() as newer:
        newer.setattr(migrations, "STEPS", (*migrations.STEPS, add_a_column))
        for _ in range(2):  # once is enough
            with closing(Store.open(url)) as store:
                assert store.get("old") == (a_request("old"), rounds_of(a_request("old")))
        assert stored_version(url) == migrations.latest()
        with connect.engine(connect.parse(url), create=False).begin() as connection:
            assert connection.execute(text("SELECT mood FROM paceline_requests")).scalar() == "calm"
    with pytest.raises(StoreError, match="it has version 6, this paceline knows 5; update paceline"):
        Store.open(url)


def test_a_migration_that_fails_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store.open(url)) as store:
        save(store, a_request("old"))
    with monkeypatch.context() as newer:
        newer.setattr(migrations, "STEPS", (*migrations.STEPS, add_a_column_and_fail))
        with pytest.raises(StoreError, match="cannot be used"):
            Store.open(url)
    assert stored_version(url) == migrations.latest()
    with monkeypatch.context() as newer:
        newer.setattr(
            migrations, "STEPS", (*migrations.STEPS, add_a_column)
        )  # would fail, were the column there already
        Store.open(url).close()


def test_many_may_make_a_store_at_once(places: Places) -> None:
    for _ in range(3):
        url = places()
        with ThreadPoolExecutor(6) as pool:
            for store in pool.map(lambda _, url=url: Store.open(url), range(6)):
                store.close()
        assert stored_version(url) == migrations.latest()


def test_others_tables_of_our_name_are_refused_and_their_database_shared(postgres: str) -> None:
    url = new_database(postgres)
    traces.execute(url, "CREATE TABLE users (id int)")
    Store.open(url).close()
    traces.execute(url, "DROP TABLE paceline_schema_version")
    with pytest.raises(StoreError, match="holds other tables"):
        Store.open(url)


def test_a_server_that_is_not_there_is_an_error_without_the_password() -> None:
    with pytest.raises(StoreError) as caught:
        Store.open("postgresql://me:SECRET@127.0.0.1:1/traces")
    assert "SECRET" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
