"""API keys: stored as hashes, checked in constant time; and the tenants that share caches."""

import hmac
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from string import hexdigits
from typing import Annotated, Any, Final

import yaml
from pydantic import AfterValidator

from paceline.atomic import locked, write_bytes
from paceline.web.api_errors import UNAUTHORIZED, ApiError
from paceline.web.config_file import (
    ConfigFileError,
    ReloadingFile,
    StrictModel,
    checked,
    expected,
    identifier,
    read,
    whole_between,
)

_PREFIX: Final = "pl-"
GIVEN: Final = "api-key"  # the name of a key from the command line
_Limit = Annotated[int, AfterValidator(partial(whole_between, 1, 1_000_000_000))]
_Priority = Annotated[int, AfterValidator(partial(whole_between, -1000, 1000))]


class KeyFileError(ConfigFileError):
    """The file of API keys cannot be used."""


def _hash_text(value: str) -> str:
    if len(value) != 64 or not set(hexdigits.lower()).issuperset(value):
        raise expected("64 hex digits in lower case, as `paceline keys new` writes them")
    return value


class KeyLimits(StrictModel):
    """The limits of one key. None: no limit."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None  # prompt and answer
    concurrent: _Limit | None = None  # requests at once
    # Of its requests, their route's included. None: 0 for what a request asks for, and its route's is added.
    max_priority: _Priority | None = None


class Key(StrictModel):
    name: Annotated[str, AfterValidator(identifier)]
    # SHA-256 of the key, in hex. Keys are 256 random bits: a slow hash would protect nothing,
    # and every request would pay for it.
    hash: Annotated[str, AfterValidator(_hash_text)]
    limits: KeyLimits = KeyLimits()
    operator: bool = False  # the page shows it the requests of all keys, and not only its own


class _File(StrictModel):
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Keys:
    keys: tuple[Key, ...] = ()

    def check(self, header: str | None) -> Key | None:
        """The key of an Authorization header. In constant time: all keys are compared."""
        digest = hash_of(_bearer(header))
        match = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.hash):
                match = key
        return match


def _bearer(header: str | None) -> str:
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def hash_of(key: str) -> str:
    return sha256(key.encode("utf-8", "replace")).hexdigest()


def tenant(
    key: Key | None, user: str | None, cache_key: str | None = None, cache_salt: str | None = None
) -> str:
    """Requests of a tenant share caches: they have the same key, salt, and cache key or else user.

    A hash: none of the four can be read from it.
    """
    of_key = sha256(b"tenant:" + (key.hash if key else "").encode()).hexdigest()[:16]
    of_user = "" if user is None else f"user:{user}"
    part = of_user if cache_key is None else f"cache:{cache_key}"
    if cache_salt is not None:
        part += f"salt:{sha256(cache_salt.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return sha256(f"{of_key}{part}".encode("utf-8", "surrogatepass")).hexdigest()


def load(path: Path | str) -> Keys:
    """Reads a keys file; KeyFileError lists all that is wrong with it, and shows none of its values."""
    data = read(Path(path), KeyFileError)
    if not isinstance(data, list):
        raise KeyFileError("the file: expected a list of keys, each with name and hash; [] for none")
    keys = checked(_File, {"keys": data}, KeyFileError, show_values=False).keys
    if problems := list(_repeated(keys)):
        raise KeyFileError(*problems)
    return Keys(keys)


def _repeated(keys: Iterable[Key]) -> Iterator[str]:
    names: dict[str, int] = {}
    hashes: dict[str, int] = {}
    for i, key in enumerate(keys):
        if names.setdefault(key.name, i) != i:
            yield f"keys[{i}].name: {key.name!r} is the name of keys[{names[key.name]}] already"
        if hashes.setdefault(key.hash, i) != i:
            yield f"keys[{i}].hash: is the hash of keys[{hashes[key.hash]}] already"


class KeyFile(ReloadingFile[Keys]):
    """The keys of a file, as it is now."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, load)


class ApiKeys:
    """Keys of the command line, which have no limits, and those of a file."""

    def __init__(self, keys: Iterable[str] = (), file: Path | str | None = None) -> None:
        given = (Key(name=f"{GIVEN}-{i}" if i else GIVEN, hash=hash_of(key)) for i, key in enumerate(keys))
        self._given = tuple(given)
        self._file = None if file is None else KeyFile(file)

    def current(self) -> Keys:
        if self._file is None:
            return Keys(self._given)
        return Keys((*self._file.current().keys, *self._given))

    def authenticate(self, headers: Mapping[str, str]) -> Key:
        """The key of a request, or an ApiError."""
        key = self.current().check(headers.get("authorization"))
        if key is None:
            raise ApiError(
                401,
                "the API key is missing or unknown: send it as 'Authorization: Bearer KEY'",
                "authentication_error",
                code="invalid_api_key",
                refusal=UNAUTHORIZED,
            )
        return key


def default_file() -> Path:
    """In $PACELINE_HOME, else in the user's settings; not in the cache, which may be emptied at any time."""
    import platformdirs

    home = os.environ.get("PACELINE_HOME")
    folder = home or platformdirs.user_config_dir("paceline", appauthor=False)
    return Path(folder).expanduser() / "keys.json"


def add(path: Path | str, name: str, limits: Mapping[str, int] | None = None, operator: bool = False) -> str:
    """Makes a key, stores its hash and returns the key, which cannot be recovered later."""
    new = _PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, Any] = {"name": name, "hash": hash_of(new)}
    if limits:
        entry["limits"] = dict(limits)
    if operator:
        entry["operator"] = True
    key = checked(_File, {"keys": [entry]}, KeyFileError).keys[0]
    with _locked(Path(path)) as file:
        keys = load(file).keys if file.exists() else ()
        if any(k.name == name for k in keys):
            raise KeyFileError(f"there is a key {name!r} already: choose another name, or remove it first")
        _write(file, (*keys, key))
    return new


def remove(path: Path | str, name: str) -> None:
    with _locked(Path(path)) as file:
        keys = load(file).keys
        left = tuple(key for key in keys if key.name != name)
        if len(left) == len(keys):
            listed = ", ".join(key.name for key in keys) or "none"
            raise KeyFileError(f"there is no key {name!r}. Known: {listed}")
        _write(file, left)


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """The file itself, wherever links lead, for one writer at a time."""
    file = path.resolve()
    with ExitStack() as stack:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(locked(file.parent))
        except OSError as problem:
            raise KeyFileError(f"cannot write {file.name}: {problem.strerror}") from None
        yield file


def _write(file: Path, keys: Iterable[Key]) -> None:
    """Replaces the file atomically: a reader sees the old keys or the new ones."""
    data = [key.model_dump(exclude_unset=True) for key in keys]
    as_yaml = file.suffix in (".yaml", ".yml")
    text = yaml.safe_dump(data, sort_keys=False) if as_yaml else json.dumps(data, indent=2) + "\n"
    try:
        write_bytes(file, text.encode(), mode=0o600)
    except OSError as problem:
        raise KeyFileError(f"cannot write {file.name}: {problem.strerror}") from None
