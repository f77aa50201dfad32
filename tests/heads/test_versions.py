"""Versions of a drafter: one serves, earlier ones can be gone back to, and none that matters is ever lost."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CorruptModel, UnknownModel, UsageError
from paceline.heads import versions
from paceline.heads.head_checkpoint import Card, read_card, save, save_card
from support.heads import random_net, tiny_model

NET = random_net(draft_vocab=60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "mine", Card("block", NET.shape, "tiny", tiny_model().fingerprint), NET)
    return tmp_path / "mine"


def there(root: Path) -> list[str]:
    """Folders of versions, finished or not."""
    return sorted(path.name for path in (root / "versions").glob("*/"))


def learned(root: Path, source: int | None = None) -> int:
    """A further version, which does not serve yet."""
    with versions.making(root) as folder:
        data = {} if source is None else {"learned": {"from": source}}
        save(folder, replace(read_card(root), data=data), NET)
        return versions.add(root, folder)


def test_at_first_it_serves_as_it_was_trained(root: Path) -> None:
    assert versions.current(root) == versions.Version(0, root)
    assert versions.numbers(root) == [0]


def test_a_version_serves_once_it_is_named(root: Path) -> None:
    assert learned(root) == 1
    assert versions.current(root).number == 0
    versions.use(root, 1)
    assert versions.current(root) == versions.Version(1, root / "versions" / "0001")
    with pytest.raises(UnknownModel, match="no version 7: expected one of 0, 1"):
        versions.use(root, 7)
    assert versions.current(root).number == 1


def test_going_back_leads_to_what_it_was_learned_from(root: Path) -> None:
    for number, source in ((1, 0), (2, 1), (3, 1)):
        assert learned(root, source) == number
        versions.use(root, number)
    assert versions.before(root) == 1
    shutil.rmtree(root / "versions" / "0001")
    assert versions.before(root) == 2
    versions.use(root, 0)
    with pytest.raises(UnknownModel, match="no version before that"):
        versions.before(root)


@given(most=st.integers(1, 4), uses=st.lists(st.booleans(), min_size=1, max_size=8))
def test_few_are_kept_and_never_without_the_current(
    tmp_path_factory: pytest.TempPathFactory, most: int, uses: list[bool]
) -> None:
    root = tmp_path_factory.mktemp("versions")
    save_card(root, Card("block", NET.shape, "tiny", "mark"))
    for used in uses:
        serving, mark = versions.current(root).number, versions.serving(root)
        with versions.making(root) as folder:
            save_card(folder, read_card(root))
            new = versions.add(root, folder)
        assert {0, serving, new} <= set(versions.numbers(root))
        assert versions.current(root).number == serving
        if used:
            assert versions.take_over(root, new, mark, most)
            assert {0, new} <= set(versions.numbers(root))
            assert len(versions.numbers(root)) <= 1 + most
            assert versions.current(root).number == new
    assert new == len(uses)  # no number is ever given twice


def test_a_version_takes_over_only_from_what_it_was_learned_from(root: Path) -> None:
    first = versions.serving(root)
    assert versions.take_over(root, learned(root), first)
    second = versions.serving(root)
    number = learned(root)
    versions.use(root, 0)  # after the new one was added, before it serves
    assert not versions.take_over(root, number, second)
    assert versions.current(root).number == 0
    assert versions.numbers(root) == [0, 1]  # nobody ever saw it


def test_one_that_was_trained_anew_meanwhile_is_not_what_it_was_learned_from(root: Path) -> None:
    mark, number = versions.serving(root), learned(root)
    save_card(root, replace(read_card(root), data={"answers": 5}))
    assert not versions.take_over(root, number, mark)
    assert versions.current(root).number == 0


NAMES = """
import sys
from pathlib import Path
from paceline.heads import versions
print("asks", flush=True)
versions.use(Path(sys.argv[1]), 0)
print("said", flush=True)
"""


@pytest.mark.slow
def test_going_back_waits_for_whoever_says_what_serves(root: Path) -> None:
    assert versions.take_over(root, learned(root), versions.serving(root))
    command = [sys.executable, "-c", NAMES, str(root)]
    with (root / "versions" / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        going_back = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert going_back.stdout is not None
        assert going_back.stdout.readline() == "asks\n"
        with pytest.raises(subprocess.TimeoutExpired):
            going_back.wait(0.5)
        assert versions.current(root).number == 1
    assert going_back.communicate(timeout=300)[0] == "said\n"
    assert versions.current(root).number == 0


def test_one_that_is_trained_anew_begins_anew(root: Path) -> None:
    learned(root)
    versions.use(root, 1)
    save_card(root, replace(read_card(root), data={"answers": 5}))
    assert versions.current(root).number == 0


def test_damage_is_reported_with_the_way_back(root: Path) -> None:
    learned(root)
    versions.use(root, 1)
    shutil.rmtree(root / "versions" / "0001")
    with pytest.raises(CorruptModel, match=r"lost its version 1: .*`paceline drafters rollback mine 0`"):
        versions.current(root)
    (root / versions.POINTER).write_text("{")
    with pytest.raises(CorruptModel, match="damaged"):
        versions.current(root)
    versions.use(root, 0)
    assert versions.current(root).number == 0


MAKES = """
import os, signal, sys
from pathlib import Path
from paceline.heads import versions
with versions.making(Path(sys.argv[1])) as folder:
    print(folder.name, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_was_never_finished_goes_and_what_is_being_made_stays(root: Path) -> None:
    """Whatever process number its maker has: it may be of another machine, or of nobody by now."""
    command = [sys.executable, "-c", MAKES, str(root)]
    maker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    theirs = maker.stdout.readline().strip()
    dead = [f".making-{os.getpid()}", ".making-999999999"]
    for name in dead:
        (root / "versions" / name).mkdir()
    with versions.making(root) as folder:
        assert there(root) == sorted([theirs, folder.name])
        save_card(folder, read_card(root))
    assert there(root) == [theirs]
    maker.communicate(timeout=300)
    with versions.making(root) as folder:
        assert there(root) == [folder.name]
    assert list((root / "versions").iterdir()) == []
    assert json.loads((root / "drafter.json").read_text())["kind"] == "block"


def test_files_that_cannot_be_locked_are_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UsageError, match=r"mine lies where files cannot be locked \(No locks available\)"):
        versions.use(root, 0)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_files_that_cannot_be_written_are_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def no_writes(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(versions, "locked", no_writes)
    with pytest.raises(UsageError, match=f"mine lies where files cannot be written .{os.strerror(error)}"):
        versions.use(root, 0)
