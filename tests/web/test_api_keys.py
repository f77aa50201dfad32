"""API keys: only hashes are kept, all are compared, and tenants stay apart."""

import hmac
import json
import os
import stat
import threading
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.web import api_keys
from paceline.web.api_keys import (
    Key,
    KeyFile,
    KeyFileError,
    KeyLimits,
    Keys,
    add,
    hash_of,
    load,
    remove,
    tenant,
)


def key(name: str, text: str) -> Key:
    return Key(name=name, hash=hash_of(text))


THREE = Keys((key("a", "pl-a"), key("b", "pl-b"), key("c", "pl-c")))


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Bearer pl-a", "a"),
        ("bearer pl-b", "b"),
        ("BEARER  pl-c ", "c"),
        ("Basic pl-a", None),
        ("pl-a", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer pl-A", None),
        ("Bearer pl-a\ud800é", None),
        (f"Bearer {hash_of('pl-a')}", None),  # a stolen file opens nothing
        ("", None),
        (None, None),
    ],
)
def test_a_header_opens_its_key_only(header: str | None, name: str | None) -> None:
    found = THREE.check(header)
    assert (found and found.name) == name


def test_no_keys_open_nothing() -> None:
    assert Keys().check("Bearer ") is None
    assert Keys().check(None) is None


@pytest.mark.parametrize("header", ["Bearer pl-a", "Bearer pl-c", "Bearer no", None])
def test_every_key_is_compared_whatever_is_given(header: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(given: str, kept: str) -> bool:
        compared.append(kept)
        return hmac.compare_digest(given, kept)

    class Watched:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(api_keys, "hmac", Watched)
    THREE.check(header)
    assert compared == [k.hash for k in THREE.keys]


@pytest.mark.parametrize("name", ["keys.json", "keys.yaml"])
def test_a_new_key_opens_and_only_its_hash_is_written(tmp_path: Path, name: str) -> None:
    file = tmp_path / "sub" / name
    old = os.umask(0)
    try:
        first = add(file, "alice", {"concurrent": 2})
        second = add(file, "bob")
    finally:
        os.umask(old)
    assert first != second
    assert len(first) >= 43
    text = file.read_text()
    assert first not in text
    assert sha256(first.encode()).hexdigest() in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(p.name for p in file.parent.iterdir()) == [name]
    found = load(file)
    opened = found.check(f"Bearer {first}")
    assert opened
    assert (opened.name, opened.limits) == ("alice", KeyLimits(concurrent=2))
    remove(file, "alice")
    assert load(file).check(f"Bearer {first}") is None
    assert load(file).check(f"Bearer {second}")
    remove(file, "bob")
    assert load(file) == Keys()


def test_a_taken_name_and_a_missing_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    add(file, "alice")
    before = file.read_bytes()
    with pytest.raises(KeyFileError, match="there is a key 'alice' already"):
        add(file, "alice")
    with pytest.raises(KeyFileError, match=r"there is no key 'bob'. Known: alice"):
        remove(file, "bob")
    with pytest.raises(KeyFileError, match=r"keys\[0\].name: 'a b' is not usable"):
        add(file, "a b")
    with pytest.raises(KeyFileError, match="requests_per_minute: 0 is not usable"):
        add(file, "bob", {"requests_per_minute": 0})
    with pytest.raises(KeyFileError, match=r"cannot read none\.json"):
        remove(tmp_path / "none.json", "alice")
    assert file.read_bytes() == before


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.json"
    add(file, "alice")
    before = file.read_bytes()

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(KeyFileError, match=r"^cannot write keys.json: No space left on device$"):
        add(file, "bob")
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]


def test_writers_at_once_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    writers = [threading.Thread(target=add, args=(file, f"k{i}")) for i in range(12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {k.name for k in load(file).keys} == {f"k{i}" for i in range(12)}


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "keys.json"
    real.write_text("[]")
    link.symlink_to(real)
    add(link, "alice")
    assert link.is_symlink()
    assert load(real).keys[0].name == "alice"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a list of keys"),
        ("{}", "expected a list of keys"),
        ("[{name: a}]", "keys[0]: hash is missing"),
        ("[{name: a, hash: pl-SECRET}]", "keys[0].hash: expected 64 hex digits"),
        (f"[{{name: a, hash: {'A' * 64}}}]", "keys[0].hash: expected 64 hex digits"),
        (
            f"[{{name: a, hash: '{'0' * 64}', limit: {{}}}}]",
            "keys[0]: unknown key 'limit'; did you mean 'limits'?",
        ),
        (
            f"[{{name: a, hash: '{'0' * 64}', limits: {{requests_a_minute: 5}}}}]",
            "keys[0].limits: unknown key 'requests_a_minute'; did you mean 'requests_per_minute'? "
            "Known: requests_per_minute, tokens_per_minute, concurrent",
        ),
        (
            f"[{{name: a, hash: '{'0' * 64}', limits: {{concurrent: 0}}}}]",
            "keys[0].limits.concurrent: expected 1 to",
        ),
        (
            f"[{{name: a, hash: '{'0' * 64}'}}, {{name: a, hash: '{'1' * 64}'}}]",
            "keys[1].name: 'a' is the name of keys[0] already",
        ),
        (
            f"[{{name: a, hash: '{'0' * 64}'}}, {{name: b, hash: '{'0' * 64}'}}]",
            "keys[1].hash: is the hash of keys[0] already",
        ),
    ],
)
def test_a_wrong_file_is_refused_and_no_value_shown(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(KeyFileError) as refused:
        load(file)
    (problem,) = refused.value.problems
    assert said in problem
    assert "SECRET" not in problem
    assert "0000" not in problem


def test_a_key_file_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.web.config_file.CHECK_EVERY_S", 0.0)
    file = tmp_path / "keys.json"
    made = add(file, "alice")
    followed = KeyFile(file)
    assert followed.current().check(f"Bearer {made}")
    remove(file, "alice")
    assert followed.current().check(f"Bearer {made}") is None


def test_tenants_are_as_written_down() -> None:
    """A saved index is found again by its tenant, so that the way to it must not change."""
    a = THREE.keys[0]
    of_key = sha256(b"tenant:" + a.hash.encode()).hexdigest()[:16]
    assert tenant(a, "u") == sha256(f"{of_key}user:u".encode()).hexdigest()
    assert tenant(a, None) == sha256(of_key.encode()).hexdigest()
    assert tenant(a, "u", "c") == sha256(f"{of_key}cache:c".encode()).hexdigest()


Who = tuple[int, str | None, str | None]  # API key, user, cache key
names = st.none() | st.sampled_from(["", "u", "user:u", "cache:u"]) | st.text()
whos = st.tuples(st.integers(-1, 2), names, names)


@given(whos, whos)
def test_tenants_are_the_same_only_for_the_same_key_and_cache_key_or_user(one: Who, other: Who) -> None:
    def of(who: Who) -> str:
        return tenant(THREE.keys[who[0]] if who[0] >= 0 else None, *who[1:])

    def part(who: Who) -> tuple[int, str | None, str | None]:
        key, user, cache_key = who
        return key, user if cache_key is None else None, cache_key

    assert (of(one) == of(other)) == (part(one) == part(other))
    assert set(of(one)) <= set("0123456789abcdef")


def test_any_user_has_a_tenant() -> None:
    assert len({tenant(None, user) for user in (None, "", "\ud800", "\0", "é")}) == 5


def test_the_default_file_is_in_paceline_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert api_keys.default_file() == tmp_path / "keys.json"
    monkeypatch.delenv("PACELINE_HOME")
    assert api_keys.default_file().name == "keys.json"


def test_json_is_written_as_json(tmp_path: Path) -> None:
    add(tmp_path / "keys.json", "alice", {"tokens_per_minute": 5})
    (entry,) = json.loads((tmp_path / "keys.json").read_text())
    assert entry.keys() == {"name", "hash", "limits"}
