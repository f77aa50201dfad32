"""Records of requests, and a PostgreSQL server to keep them in."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from glob import glob
from pathlib import Path
from typing import IO, Any

import psycopg
from hypothesis import strategies as st

from paceline.trace.record import RequestRecord, RoundRecord

NOW = 1_800_000_000.0


def a_request(id: str, **given: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "created": NOW,
        "model": "smollm2-135m",
        "route": "agents",
        "endpoint": "/v1/chat/completions",
        "tenant": "t1",
        "drafters": ("suffix", "ngram"),
        "params": {"temperature": 0.7, "seed": 2**64 - 1},
        "prompt_tokens": 512,
        "cached_tokens": 448,
        "output_tokens": 24,
        "passes": 8,
        "drafted": 40,
        "accepted": 16,
        "drafted_by_source": {"suffix": 30, "ngram": 10},
        "accepted_by_source": {"suffix": 16},
        "finish": "stop",
        "queue_s": 0.001,
        "first_token_s": 0.05,
        "seconds": 0.4,
    }
    return RequestRecord(id, **(values | given))


def a_round(request: str, index: int, **given: Any) -> RoundRecord:
    values: dict[str, Any] = {
        "start": 512 + 3 * index,
        "budget": 8,
        "drafted": 5,
        "accepted": 2,
        "committed": 3,
        "batch": 1,
        "rows": 6,
        "draft_us": 40,
        "target_us": 21_000,
        "sources": (("suffix", 4), ("ngram", 1)),
    }
    return RoundRecord(request, index, **(values | given))


def rounds_of(record: RequestRecord) -> tuple[RoundRecord, ...]:
    return tuple(a_round(record.id, i) for i in range(record.passes))


# Everything a Python text can hold, NUL and lone surrogates too.
any_text = st.text(st.characters(exclude_categories=()), max_size=20)
# In JSON two surrogates that make a pair are one character, so none here.
json_text = st.text(st.characters(codec="utf-8"), max_size=20)
any_int = st.integers(-(2**63), 2**63 - 1)
any_float = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | any_float | json_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_text, inner, max_size=3),
    max_leaves=6,
)
counts = st.dictionaries(json_text, any_int, max_size=3)
token_ids = st.none() | st.lists(st.integers(0, 2**32), max_size=5).map(tuple)
json_list = st.none() | st.lists(json_values, max_size=3)

_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "drafters": st.lists(json_text, max_size=3).map(tuple),
    "params": st.dictionaries(json_text, json_values, max_size=4),
    "metadata": st.dictionaries(json_text, json_text, max_size=4),
    "drafted_by_source": counts,
    "accepted_by_source": counts,
    "predicted_calls": counts,
    "messages": json_list,
    "tools": json_list,
    "sources": st.lists(st.tuples(json_text, any_int), max_size=3).map(tuple),
    **dict.fromkeys(("prompt_ids", "output_ids", "parents", "path", "draft_tokens", "tokens"), token_ids),
}
_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: any_text,
    str | None: st.none() | any_text,
    int: any_int,
    float: any_float,
    float | None: st.none() | any_float,
    bool: st.booleans(),
}


def _fields(record: type[RequestRecord] | type[RoundRecord]) -> dict[str, st.SearchStrategy[Any]]:
    return {f.name: _SPECIAL[f.name] if f.name in _SPECIAL else _BY_TYPE[f.type] for f in fields(record)}


any_request = st.builds(RequestRecord, **_fields(RequestRecord))
any_round = st.builds(RoundRecord, **_fields(RoundRecord))


TIED = '"$@" & read _; kill -INT $!; wait'  # ends with its standard input, even if the tests are killed


def why_no_postgres() -> str | None:
    """Why there can be no server here."""
    if _program("initdb") is None or _program("postgres") is None:
        return "PostgreSQL's initdb and postgres are not here"
    if os.geteuid() == 0 and _owner() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return None


@contextmanager
def postgres() -> Iterator[str]:
    """Its URL, with {} for a database's name. It is reached through a socket in its folder only."""
    folder = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))  # short: a socket's path is at most 107 bytes
    data = folder / "data"
    _give_away(folder)
    try:
        _run("initdb", "-D", data, "-U", "paceline", "-A", "trust", "-E", "UTF8", "--no-sync")
        url = f"postgresql://paceline@/{{}}?host={folder}"
        settings = ("-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-F")
        server = [_program("postgres"), "-D", data, *settings]
        with (folder / "log").open("w") as log, _popen("sh", "-c", TIED, "sh", *server, log=log):
            _wait_for(url.format("postgres"))
            yield url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def execute(url: str, *statements: Any) -> list[tuple[Any, ...]]:
    """The rows of the last statement, if it gives any."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def _program(name: str) -> str | None:
    found = shutil.which(name) or max(glob(f"/usr/lib/postgresql/*/bin/{name}"), default=None)
    return found and os.path.realpath(found)  # it looks for its files beside itself


def _owner() -> pwd.struct_passwd | None:
    users = {user.pw_name: user for user in pwd.getpwall()}
    return users.get("postgres") or users.get("nobody")


def _give_away(folder: Path) -> None:
    if os.geteuid() == 0 and (owner := _owner()):
        os.chown(folder, owner.pw_uid, owner.pw_gid)


def _run(name: str, *arguments: object) -> None:
    command = [str(_program(name)), *map(str, arguments)]
    subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, timeout=60, **_as_owner())


def _popen(*command: object, log: IO[str]) -> "subprocess.Popen[bytes]":
    words = [str(word) for word in command]
    return subprocess.Popen(words, cwd="/", stdin=subprocess.PIPE, stdout=log, stderr=log, **_as_owner())


def _as_owner() -> dict[str, Any]:
    owner = _owner() if os.geteuid() == 0 else None
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner is not None else {}


def _wait_for(url: str) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            return psycopg.connect(url).close()
        except psycopg.OperationalError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)
