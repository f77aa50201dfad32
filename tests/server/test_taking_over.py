"""A newly trained version is served, unless another one was chosen meanwhile."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.config import EngineConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.engine.engine_thread import EngineThread
from paceline.heads import versions
from paceline.heads.head_checkpoint import Card, read_card, save, save_card
from paceline.loading import TrainedHead, find_heads
from paceline.server.online.online_trainer import OnlineTrainer
from paceline.server.online.process import TrainerProcess
from paceline.server.telemetry.metrics import Metrics
from paceline.testing import ToyTarget
from paceline.trace.online import OnlineTrainingConfig, TrainingSample
from support.heads import random_net, tiny_model
from support.servers import until

WAIT_S = 60
Against = Callable[[Path, Sequence[Path], OnlineTrainingConfig], str]
CONFIG = OnlineTrainingConfig(idle_s=0.0, min_new_samples=1)  # always idle


class RecordingTrainer(OnlineTrainer):
    """Records the versions it is to load, without a model."""

    served: list[int]

    def _load(self, head: TrainedHead) -> None:
        self.served.append(head.version.number)


def learning(
    root: Path, begin: Callable[[bytes], TrainerProcess], against: Against = lambda *_: ""
) -> RecordingTrainer:
    worker = EngineThread(Engine(ToyTarget(), model_free(), Fixed()))
    no_model, found = cast(Any, None), find_heads([root])
    metrics = Metrics("toy", ["block"], lambda: 0, lambda: 0, lambda: 0)
    made = RecordingTrainer(
        no_model,
        worker,
        found,
        root,
        metrics,
        EngineConfig("cpu"),
        CONFIG,
        start_process=begin,
        memory_shortage=against,
    )
    made.served = []
    made.add_sample(TrainingSample((1, 2, 3, 4), 1, {}, "hello"))
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root, net = tmp_path / "mine", random_net(draft_vocab=60)
    save(root, Card("block", net.shape, "tiny", tiny_model().fingerprint), net)
    return root


def add(root: Path) -> int:
    with versions.making(root) as folder:
        save_card(folder, read_card(root))
        return versions.add(root, folder)


def says_made(root: Path) -> Callable[[bytes], TrainerProcess]:
    """A process that has learned from what serves now."""
    told = {"drafter": "mine", "kind": "block", "before": 1.0, "after": 2.0}
    line = json.dumps({**told, "made": add(root), "learned_from": versions.serving(root)})
    return lambda job: TrainerProcess(job, (sys.executable, "-c", f"print({line!r})"))


def test_what_was_made_serves(root: Path) -> None:
    server = learning(root, says_made(root))

    def serves() -> bool:
        server.poll()
        return server.served == [1] and server.process is None

    assert until(serves, WAIT_S)
    assert versions.current(root).number == 1


def test_going_back_is_not_undone_by_what_is_made_meanwhile(root: Path) -> None:
    assert versions.take_over(root, add(root), versions.serving(root))
    server = learning(root, says_made(root))
    server.poll()
    assert server.process is not None
    versions.use(root, 0)

    def ended() -> bool:
        server.poll()
        return server.process is None

    assert until(ended, WAIT_S)
    server.poll()
    assert versions.current(root).number == 0
    assert server.served == [0]
    assert versions.numbers(root) == [0, 1]


def test_a_server_that_ends_does_not_lose_what_was_made(root: Path) -> None:
    server = learning(root, says_made(root))
    server.poll()
    process = server.process
    assert process is not None
    assert until(lambda: process.exit_code is not None, WAIT_S)
    server.close(60)
    assert versions.current(root).number == 1


def test_without_memory_nothing_begins_and_one_line_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[bytes] = []
    lacks = ["too little", "too little", "", "too little"]

    def begin(job: bytes) -> TrainerProcess:
        begun.append(job)
        return TrainerProcess(job, (sys.executable, "-c", ""))

    server = learning(root, begin, lambda *_: lacks.pop(0))
    with caplog.at_level(logging.WARNING, "paceline.server"):
        for expected in (0, 0, 1):
            server.poll()
            server.poll()  # tried again only once there are new texts
            assert len(begun) == expected
            server.add_sample(TrainingSample((1, 2, 3, 4), 1, {}, "hello"))
        assert caplog.messages == ["too little"]

        def ended() -> bool:
            server.poll()
            return server.process is None

        assert until(ended, WAIT_S)
        server.poll()
    assert caplog.messages == ["too little"] * 2
    assert len(begun) == 1
    assert lacks == []
