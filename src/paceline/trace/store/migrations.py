"""Which version a store has, and the steps from an older one to ours."""

from collections.abc import Callable

from sqlalchemy import Connection, func, insert, inspect, select, text, update

from paceline.errors import StoreError
from paceline.trace.store.schema import GATE_TABLES, METADATA, UPSTREAM_WINDOWS, VERSIONS

Step = Callable[[Connection], None]


def _add_metadata(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE paceline_requests ADD COLUMN metadata JSON NOT NULL DEFAULT '{}'"))


def _add_gate_tables(connection: Connection) -> None:
    """As they are now: whoever changes one of them writes their definition of version 3 down here first."""
    METADATA.create_all(connection, tables=GATE_TABLES)


def _add_upstream_windows(connection: Connection) -> None:
    METADATA.create_all(connection, tables=[UPSTREAM_WINDOWS])


def _add_conversations(connection: Connection) -> None:
    columns = (
        "client TEXT NOT NULL DEFAULT ''",
        "conversation TEXT NOT NULL DEFAULT ''",
        "disk_tokens BIGINT NOT NULL DEFAULT 0",
        "predicted_calls JSON NOT NULL DEFAULT '{}'",
    )
    for column in columns:
        connection.execute(text(f"ALTER TABLE paceline_requests ADD COLUMN {column}"))
    connection.execute(
        text("CREATE INDEX paceline_requests_conversation ON paceline_requests (conversation, created)")
    )


# STEPS[n - 1] takes a store from version n to n + 1; once released, a step stays as it is.
# A new store is made as METADATA says, so a step and METADATA change together.
STEPS: tuple[Step, ...] = (_add_metadata, _add_gate_tables, _add_upstream_windows, _add_conversations)

ONE_AT_A_TIME = 0x706163656C696E65  # of PostgreSQL's advisory locks, the one for making and changing tables


def latest() -> int:
    return len(STEPS) + 1


def version(connection: Connection) -> int | None:
    """None: nothing is there yet. A store that is not ours, or newer than we know, is an error."""
    tables = set(inspect(connection).get_table_names())
    if VERSIONS.name in tables:
        stored = connection.execute(select(func.max(VERSIONS.c.version))).scalar()
        return _known(stored)
    shared = connection.dialect.name == "postgresql"  # a database may hold others' tables too, a file may not
    if tables & set(METADATA.tables) if shared else tables:
        raise StoreError("it holds other tables and is no trace store; give another path or URL")
    return None


def _known(stored: int | None) -> int:
    if stored is None:
        raise StoreError("it does not say its version; restore it from a copy, or give another path or URL")
    if stored > latest():
        raise StoreError(f"it has version {stored}, this paceline knows {latest()}; update paceline")
    return stored


def migrate(connection: Connection) -> None:
    """Makes or updates the tables, in the caller's transaction, which must be one that writes."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ONE_AT_A_TIME})
    stored = version(connection)  # again: another process may have been quicker
    if stored is None:
        METADATA.create_all(connection)
        connection.execute(insert(VERSIONS).values(version=latest()))
        return
    for step in STEPS[stored - 1 :]:
        step(connection)
    connection.execute(update(VERSIONS).values(version=latest()))
