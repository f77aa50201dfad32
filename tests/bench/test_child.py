"""A peer may answer, refuse, crash or hang: each is told apart, and none takes the run with it."""

import sys
from collections.abc import Iterator

import pytest

from bench.peers.child import Child, PeerFailed
from support import SUPPORT

FAKE = SUPPORT / "fake_driver.py"


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child([sys.executable, str(FAKE)], {"PYTHONPATH": "."})
    yield child
    child.close()


def load(child: Child, mode: str) -> None:
    child.load(60, model="none.gguf", mode=mode)


def test_answers_come_back_whole(child: Child) -> None:
    load(child, "plain")
    answer = child.generate(60, prompt=[5, 6], max_tokens=2, seed=9)
    assert child.version == "fake 1"
    assert answer.tokens == [6, 9]
    assert answer.passes == 2
    assert child.peak_mb() > 1


def test_a_refusal_leaves_the_child_alive(child: Child) -> None:
    load(child, "refuse")
    for _ in range(2):
        with pytest.raises(PeerFailed, match="ValueError: not this prompt"):
            child.generate(60, prompt=[1])


def test_a_model_that_cannot_be_loaded(child: Child) -> None:
    with pytest.raises(PeerFailed, match="cannot read this file"):
        load(child, "no load")


def test_a_crash_is_reported_with_its_signal_and_last_words(child: Child) -> None:
    load(child, "crash")
    with pytest.raises(PeerFailed, match="SIGSEGV: last words"):
        child.generate(60, prompt=[1])
    with pytest.raises(PeerFailed):  # and again, not a hang
        child.generate(60, prompt=[1])


def test_a_hang_ends_after_the_time_given(child: Child) -> None:
    load(child, "hang")
    with pytest.raises(PeerFailed, match="no answer to 'generate' within"):
        child.generate(0.3, prompt=[1])
    with pytest.raises(PeerFailed, match="ended before"):
        child.peak_mb()


def test_a_driver_that_does_not_exist() -> None:
    child = Child([sys.executable, "-m", "bench.peers.no_such_system"])
    with pytest.raises(PeerFailed, match="exit 1"):
        child.load(60, model="none.gguf")
    child.close()
