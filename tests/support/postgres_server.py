"""A PostgreSQL server that lives as long as the tests."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import IO, Any

import psycopg

TIED = '"$@" & read _; kill -INT $!; wait'  # ends with its standard input, even if the tests are killed


def missing() -> str | None:
    """Why there can be no server here."""
    if _program("initdb") is None or _program("postgres") is None:
        return "PostgreSQL's initdb and postgres are not here"
    if os.geteuid() == 0 and _owner() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return None


@contextmanager
def running() -> Iterator[str]:
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
