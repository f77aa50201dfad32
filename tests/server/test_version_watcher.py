"""Which version serves: taken up once, when there is time for it; one that cannot be changes nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import CorruptModel
from paceline.heads import versions
from paceline.heads.head_checkpoint import Card, read_card, save, save_card
from paceline.loading import TrainedHead, find_heads
from paceline.server.online.version_watcher import VersionWatcher
from support.heads import random_net, tiny_model


class Server:
    """Takes versions up, but for those it cannot load."""

    def __init__(self, root: Path) -> None:
        self.now = 0.0
        self.tried: list[int] = []
        self.broken: dict[int, Exception] = {}
        self.following = VersionWatcher(find_heads([root]), self.serve, 60.0, lambda: self.now)

    def serve(self, one: TrainedHead) -> None:
        self.tried.append(one.version.number)
        if one.version.number in self.broken:
            raise self.broken[one.version.number]

    def looks(self, times: int = 3, idle: bool = True) -> None:
        for _ in range(times):
            self.following.poll(idle)
            self.now += 0.1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root, net = tmp_path / "mine", random_net(draft_vocab=60)
    save(root, Card("block", net.shape, "tiny", tiny_model().fingerprint), net)
    for _ in range(3):
        with versions.making(root) as folder:
            save_card(folder, read_card(root))
            versions.add(root, folder)
    return root


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.ERROR, "paceline.server"):
        yield caplog


def test_each_is_taken_up_once(root: Path) -> None:
    server = Server(root)
    server.looks()
    assert server.tried == []
    for number in (1, 2, 1):
        versions.use(root, number)
        server.looks()
    assert server.tried == [1, 2, 1]
    versions.use(root, 1)  # named again
    server.looks()
    assert server.tried == [1, 2, 1]


def test_a_busy_server_waits_for_its_own_clock(root: Path) -> None:
    """Not for that of the machine that wrote the file."""
    server = Server(root)
    server.looks()
    versions.use(root, 1)
    server.looks(10, idle=False)
    assert server.tried == []
    server.now += 60
    server.looks(10, idle=False)
    assert server.tried == [1]


@pytest.mark.parametrize("problem", [CorruptModel("it is damaged"), MemoryError(), ValueError("odd")])
def test_one_that_cannot_be_loaded_is_logged_once_and_the_next_is_tried(
    root: Path, errors: pytest.LogCaptureFixture, problem: Exception
) -> None:
    server = Server(root)
    versions.use(root, 1)
    server.looks()
    server.broken[2] = problem
    versions.use(root, 2)
    server.looks(20)
    assert server.tried == [1, 2]
    (line,) = errors.messages
    assert line.startswith("keeping mine at version 1: ")
    assert "it is damaged" in line or f"{type(problem).__name__} in serve" in line
    versions.use(root, 3)
    server.looks()
    assert server.tried == [1, 2, 3]
    versions.use(root, 2)
    server.broken.clear()
    server.looks()
    assert server.tried == [1, 2, 3, 2]


def test_a_pointer_that_cannot_be_read_is_logged_once(root: Path, errors: pytest.LogCaptureFixture) -> None:
    server = Server(root)
    (root / versions.POINTER).write_text("{")
    server.looks(20)
    assert [line.split(":")[0] for line in errors.messages] == ["keeping mine at version 0"]
    versions.use(root, 2)
    server.looks()
    assert server.tried == [2]
