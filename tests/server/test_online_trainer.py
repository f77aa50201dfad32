"""A server whose drafter learns: narrow traffic makes it better, requests come first, and no word changes."""

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli import main
from paceline.config import EngineConfig
from paceline.errors import UsageError
from paceline.heads.head_checkpoint import Card, read_card, save
from paceline.heads.versions import current
from paceline.loading import find_heads
from paceline.server.launch import ServerSettings
from paceline.server.online.online_trainer import SampleBuffer
from paceline.target.weights.reader import load
from paceline.text import Tokenizer
from paceline.trace.online import OnlineTrainingConfig, TrainingSample
from paceline.train.data.held_out import is_held_out
from paceline.train.recipe import TrainConfig, new_recipe
from paceline.train.train_decoder import TrainDecoder
from support.processes import state
from support.servers import Running, running, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

PLACES = {
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Ghana": "Accra",
    "Iraq": "Baghdad",
    "India": "New Delhi",
    "China": "Beijing",
}
LEARN = OnlineTrainingConfig(
    idle_s=1.0,
    patience_s=0.5,
    min_new_samples=len(PLACES),
    steps=24,
    lr=2e-3,
    held_out=0.3,
    min_positions=10,
)
BLOCK = {"drafters": ["block"], "adaptive": False, "num_speculative_tokens": 4}
PLAIN = {"disabled": True}
WAIT_S = 300  # on a machine that has much else to do
LEARN_S = 1800  # there, whoever is least in rank gets only what all others leave


def question(country: str) -> str:
    return f"What is the capital of {country}?"


HELD_OUT = [country for country in PLACES if is_held_out(question(country), LEARN.held_out)]


@pytest.fixture(scope="module")
def drafter(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one, untrained, which could guess the words of the answers."""
    folder = tmp_path_factory.mktemp("learning") / "ours"
    weights, tokenizer = load(smollm2_path), Tokenizer.load(smollm2_path)
    words = {t for a, b in PLACES.items() for t in tokenizer.encode(f"The capital of {a} is {b}.")}
    ids = torch.tensor(sorted({*range(64), *words, *tokenizer.eos_ids}))
    model = TrainDecoder(weights, "cpu", torch.float32)
    shape = TrainConfig(layers=1, block=4, markov_rank=32, ff_width=256)
    net = new_recipe(shape, model, ids, weights.tensors).net
    save(folder, Card("block", net.shape, "smollm2-135m", model.fingerprint), net)
    return folder


@dataclass(slots=True)
class Life:
    """Observations of a server while it trained."""

    texts: dict[str, list[str]] = field(default_factory=dict)  # when -> of each held-out question
    passes: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    crashed: int = 0  # processes
    states: list[str] = field(default_factory=list)  # of the one that learned, while a request was answered
    watched_in_flight: int = 0  # requests, after the last of these
    nice: int = 0
    in_flight: int = 0  # requests, when a version was taken up though the server was busy


class Client:
    def __init__(self, server: Running, life: Life) -> None:
        self._server, self._life = server, life

    def ask(self, country: str, spec: dict[str, Any], **more: Any) -> Any:
        return self._server.client().chat.completions.create(
            model=self._server.model,
            messages=[{"role": "user", "content": question(country)}],
            max_tokens=16,
            temperature=0,
            extra_body={"metrics": True, "speculative_config": spec, **more},
        )

    def measure(self, when: str) -> None:
        """Held-out questions, of which nothing is kept."""
        said = [self.ask(country, BLOCK, remember=False) for country in HELD_OUT]
        self._life.texts[when] = [one.choices[0].message.content for one in said]
        self._life.passes[when] = sum(one.to_dict()["metrics"]["passes"] for one in said)

    def traffic(self) -> None:
        for country in PLACES:
            self.ask(country, BLOCK)

    def watched(self, pid: int) -> None:
        """States of the trainer process while an answer is written."""
        with self.story(max_tokens=4000) as stream:
            next(iter(stream))
            until(lambda: state(pid) in ("T", ""), WAIT_S)  # who is told to stop needs a core to do so
            self._life.states = [state(pid) for _ in range(5)]
            self._life.watched_in_flight = self._server.in_flight

    def story(self, max_tokens: int) -> Any:
        return self._server.client().chat.completions.create(
            model=self._server.model,
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"store": False, "ignore_eos": True, "speculative_config": BLOCK},
        )

    def until(self, holds: Callable[[], bool], seconds: float = WAIT_S) -> None:
        assert until(holds, seconds), "\n".join(self._life.log)

    def new_learner(self) -> int:
        """The process, once there is one."""
        learning = self._server.app.log.trainer
        assert learning is not None
        self.until(lambda: learning.process is not None)
        process = learning.process
        assert process is not None
        return process.pid

    def counted(self, name: str) -> float:
        text = self._server.app.log.metrics.render()[0].decode()
        found = re.search(rf"^paceline_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def life(drafter: Path) -> Iterator[Life]:
    seen = Life()
    listener = logging.Handler()
    listener.emit = lambda record: seen.log.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("paceline.server")
    log.addHandler(listener)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with running(
            "smollm2-135m", EngineConfig("cpu", cache_mb=64), trained=(str(drafter),), online_training=LEARN
        ) as s:
            _live(Client(s, seen), s, drafter, seen)
        yield seen
    finally:
        log.removeHandler(listener)
        log.setLevel(level)


def _live(client: Client, server: Running, drafter: Path, seen: Life) -> None:
    plain = [client.ask(country, PLAIN, remember=False) for country in HELD_OUT]
    seen.texts["plain"] = [one.choices[0].message.content for one in plain]
    client.measure("before")
    client.traffic()
    os.kill(client.new_learner(), signal.SIGKILL)
    seen.crashed = 1
    client.until(lambda: any("training process exited with -9" in line for line in seen.log))
    client.measure("after the crash")
    client.traffic()
    learner = client.new_learner()
    seen.nice = os.getpriority(os.PRIO_PROCESS, learner)
    client.watched(learner)
    client.until(lambda: state(learner) != "T")
    client.until(lambda: state(learner) == "", LEARN_S)
    client.until(lambda: client.counted("drafter_version") == 1)
    client.measure("after")
    seen.metrics["texts"] = str(client.counted("learn_texts_total"))
    seen.metrics["steps"] = str(client.counted("learn_steps_total"))
    main_ends("drafters", "rollback", str(drafter))
    client.until(lambda: client.counted("drafter_version") == 0)
    client.measure("gone back")
    with client.story(max_tokens=4000) as stream:
        next(iter(stream))
        main_ends("drafters", "rollback", str(drafter), "1")
        client.until(lambda: client.counted("drafter_version") == 1)
        seen.in_flight = server.in_flight


def main_ends(*command: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(command)
    assert not end.value.code


def test_no_word_changes(life: Life) -> None:
    assert len(HELD_OUT) >= 3
    assert set(life.texts) == {"plain", "before", "after the crash", "after", "gone back"}
    assert all(said == life.texts["plain"] for said in life.texts.values())


def test_text_it_never_trained_on_is_drafted_better(life: Life, drafter: Path) -> None:
    assert life.passes["after"] <= 0.85 * life.passes["before"]
    learned = read_card(current(drafter).folder).data["learned"]
    assert learned["tokens_per_pass"]["after"] > learned["tokens_per_pass"]["before"] + 0.2
    assert learned["held_out_texts"] == 2 * len(HELD_OUT)


def test_going_back_is_going_back(life: Life) -> None:
    assert life.passes["gone back"] == life.passes["before"]
    assert life.in_flight == 1  # a busy server follows, too


def test_a_request_stops_whoever_learns(life: Life) -> None:
    assert life.nice == 19
    assert set(life.states) == {"T"}
    assert life.watched_in_flight == 1


def test_a_crash_is_reported_and_loses_nothing(life: Life) -> None:
    assert life.passes["after the crash"] == life.passes["before"]
    assert "online training on 28 samples" in life.log


def test_only_what_may_be_kept_is_kept(life: Life) -> None:
    assert life.metrics["texts"] == str(float(2 * len(PLACES)))
    assert life.metrics["steps"] == str(float(LEARN.steps))


def test_the_log_tells_what_serves(life: Life) -> None:
    assert any(re.match(r"ours: version 1; tokens per pass .* before, .* after$", line) for line in life.log)
    serving = [line for line in life.log if "drafts with version" in line]
    assert serving == [f"ours drafts with version {number} now" for number in (1, 0, 1)]
    assert not any("capital" in line or str(Path.home()) in line for line in life.log)


def test_a_restart_keeps_what_was_learned(life: Life, drafter: Path) -> None:
    (found,) = find_heads([drafter])
    assert (found.name, found.version.number) == ("ours", 1)


def test_learning_needs_somebody_who_learns() -> None:
    with pytest.raises(UsageError, match=r"--online-training needs a trained drafter: .* --trained"):
        ServerSettings("smollm2-135m", online_training=LEARN)
    with pytest.raises(UsageError, match="online_training needs remember=True"):
        ServerSettings("smollm2-135m", trained=("ours",), online_training=LEARN, remember=False)


def test_without_the_signals_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGSTOP")
    with pytest.raises(UsageError, match="needs SIGSTOP, which this system does not have"):
        ServerSettings("smollm2-135m", trained=("ours",), online_training=LEARN)


@given(st.lists(st.integers(1, 40), max_size=20))
def test_the_oldest_texts_go(lengths: list[int]) -> None:
    kept = SampleBuffer(100)
    for number, length in enumerate(lengths):
        kept.add(TrainingSample((0,) * length, 1, {}, str(number)))
    assert kept.new == len(lengths)
    there = kept.take()
    assert [t.opening for t in there] == [str(n) for n in range(len(lengths))][len(lengths) - len(there) :]
    assert sum(len(t.tokens) for t in there) <= 100
    before = lengths[: len(lengths) - len(there)]
    assert not before or before[-1] + sum(len(t.tokens) for t in there) > 100
    assert (kept.new, kept.take()) == (0, there)
