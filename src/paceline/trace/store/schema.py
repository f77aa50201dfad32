"""The tables, and the way between rows and records. Columns are named as the records' fields are."""

import re
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    RowMapping,
    Table,
    Text,
    TypeDecorator,
)

from paceline.trace.record import TEXT, RequestRecord, RoundRecord


class AnyText(TypeDecorator[str]):
    """Text as it came. PostgreSQL stores no NUL and UTF-8 no lone surrogate: both are kept as escapes."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _escaped(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _unescaped(value)


def _escaped(text: str) -> str:
    return re.sub("[\\\\\0\ud800-\udfff]", lambda c: "\\\\" if c[0] == "\\" else f"\\u{ord(c[0]):04x}", text)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(?:\\|u([0-9a-f]{4}))", lambda c: chr(int(c[1], 16)) if c[1] else "\\", text)


def _key() -> Column[int]:
    return Column("key", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)  # in order of saving


def _json(name: str, optional: bool = False) -> Column[Any]:
    # Not JSONB, which refuses what JSON may say: \u0000 and lone surrogates.
    return Column(name, JSON(none_as_null=True), nullable=optional)


def _text(name: str, optional: bool = False) -> Column[str]:
    return Column(name, AnyText, nullable=optional)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _seconds(name: str, optional: bool = False) -> Column[float]:
    return Column(name, Double, nullable=optional)


METADATA: Final = MetaData()

VERSIONS: Final = Table("paceline_schema_version", METADATA, Column("version", Integer, nullable=False))

REQUESTS: Final = Table(
    "paceline_requests",
    METADATA,
    _key(),
    Column("id", AnyText, nullable=False, unique=True),
    _seconds("created"),
    *(_text(name) for name in ("model", "route", "endpoint", "tenant", "accept")),
    Column("lossy", Boolean, nullable=False),
    *(_json(name) for name in ("drafters", "params", "drafted_by_source", "accepted_by_source")),
    *(_count(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")),
    *(_count(name) for name in ("passes", "drafted", "accepted")),
    *(_text(name, optional=True) for name in ("finish", "error")),
    _seconds("queue_s"),
    _seconds("first_token_s", optional=True),
    _seconds("seconds"),
    *(_text(name, optional=True) for name in ("prompt", "output")),
    *(_json(name, optional=True) for name in ("messages", "tools", "prompt_ids", "output_ids")),
    Column("metadata", JSON, nullable=False, server_default="{}"),
    Column("client", AnyText, nullable=False, server_default=""),
    Column("conversation", AnyText, nullable=False, server_default=""),
    Column("disk_tokens", BigInteger, nullable=False, server_default="0"),
    Column("predicted_calls", JSON, nullable=False, server_default="{}"),
    Index("paceline_requests_created", "created"),
    Index("paceline_requests_conversation", "conversation", "created"),
)

ROUNDS: Final = Table(
    "paceline_rounds",
    METADATA,
    Column("request_key", ForeignKey(REQUESTS.c.key, ondelete="CASCADE"), primary_key=True),
    Column("index", BigInteger, primary_key=True, autoincrement=False),
    *(_count(name) for name in ("start", "budget", "drafted", "accepted", "committed")),
    *(_count(name) for name in ("batch", "rows", "draft_us", "target_us")),
    _json("sources"),
    *(_json(name, optional=True) for name in ("parents", "path", "draft_tokens", "tokens")),
    _text("finish", optional=True),
    sqlite_with_rowid=False,  # one tree instead of a table and an index
)

PAIRS: Final = Table(
    "paceline_pairs",
    METADATA,
    _key(),
    Column("id", AnyText, nullable=False, unique=True),
    _seconds("created"),
    _text("experiment"),
    _json("pair"),
    Index("paceline_pairs_experiment", "experiment", "created"),
)

SERVED: Final = Table(  # who answered a user, of routes that have a candidate
    "paceline_served",
    METADATA,
    _key(),
    _seconds("created"),
    *(_text(name) for name in ("request", "response", "client", "experiment", "route", "cohort", "arm")),
    Index("paceline_served_request", "request"),
    Index("paceline_served_response", "response"),
    Index("paceline_served_created", "created"),
)

FEEDBACK: Final = Table(
    "paceline_feedback",
    METADATA,
    _key(),
    _seconds("created"),
    *(_text(name) for name in ("request", "experiment", "route", "cohort", "arm")),
    _text("thumbs", optional=True),
    Column("escalation", Boolean, nullable=False),
    Index("paceline_feedback_experiment", "experiment", "created"),
)

ROLLOUTS: Final = Table(
    "paceline_rollouts",
    METADATA,
    Column("experiment", AnyText, primary_key=True),
    _text("state"),
    _seconds("share"),  # of users that the candidate serves
    _seconds("since"),
    _count("version"),  # grows with every change: of two writers, one comes too late
)

ROLLOUT_CHANGES: Final = Table(  # the audit: never updated, never pruned
    "paceline_rollout_changes",
    METADATA,
    _key(),
    _seconds("created"),
    *(_text(name) for name in ("experiment", "actor", "reason", "from_state", "to_state")),
    *(_seconds(name) for name in ("from_share", "to_share")),
    _json("verdict", optional=True),
    Index("paceline_rollout_changes_experiment", "experiment"),
)

UPSTREAM_WINDOWS: Final = Table(  # growth of the upstreams' counters
    "paceline_upstream_windows",
    METADATA,
    _key(),
    _seconds("created"),
    _text("experiment"),
    _json("window"),
    Index("paceline_upstream_windows_experiment", "experiment", "created"),
)

GATE_TABLES: Final = (PAIRS, SERVED, FEEDBACK, ROLLOUTS, ROLLOUT_CHANGES)

SUMMARY: Final = tuple(c for c in REQUESTS.columns if c.name not in TEXT)  # what a list shows

_ROUND_FIELDS: Final = tuple(f.name for f in fields(RoundRecord) if f.name != "request")


def request_row(record: RequestRecord) -> dict[str, Any]:
    row = {f.name: getattr(record, f.name) for f in fields(record)}
    for name in ("params", "metadata", "drafted_by_source", "accepted_by_source", "predicted_calls"):
        row[name] = dict(row[name])  # any mapping will do
    return row


def round_row(r: RoundRecord, request_key: int) -> dict[str, Any]:
    return {"request_key": request_key} | {name: getattr(r, name) for name in _ROUND_FIELDS}


def request_of(row: RowMapping) -> RequestRecord:
    """Text that was not read is None."""
    values = {f.name: row.get(f.name) for f in fields(RequestRecord)}
    return RequestRecord(**_with_tuples(values, "drafters", "prompt_ids", "output_ids"))


def round_of(row: RowMapping, request: str) -> RoundRecord:
    values: dict[str, Any] = {name: row[name] for name in _ROUND_FIELDS}
    values["sources"] = tuple((name, count) for name, count in values["sources"])
    return RoundRecord(request, **_with_tuples(values, "parents", "path", "draft_tokens", "tokens"))


def _with_tuples(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return values | {name: None if values[name] is None else tuple(values[name]) for name in names}
