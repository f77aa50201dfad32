"""The recorder: rounds in, requests out, and never in the way."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import StoreError
from paceline.trace import recorder as recorder_module
from paceline.trace.record import RequestRecord, RoundRecord, round_record, without_text, without_tokens
from paceline.trace.recorder import Recorder
from paceline.trace.store import Store
from paceline.types import NO_DRAFT, Draft, Round, Seq
from support.traces import a_request

WAIT_S = 60.0


class Shelf:
    """A store in memory that can be slow or broken."""

    def __init__(self) -> None:
        self.saved: dict[str, tuple[RequestRecord, Sequence[RoundRecord]]] = {}
        self.prunes = 0
        self.broken: Exception | None = None
        self.free = threading.Event()  # a save waits for it
        self.free.set()
        self.entered = threading.Event()

    def save(self, record: RequestRecord, rounds: Sequence[RoundRecord]) -> None:
        self.entered.set()
        assert self.free.wait(WAIT_S)
        if self.broken is not None:
            raise self.broken
        self.saved[record.id] = (record, rounds)

    def prune(self) -> int:
        self.prunes += 1
        return 0


def a_round(request: str, draft: Draft = NO_DRAFT, path: tuple[int, ...] = (), start: int = 4) -> Round:
    return Round(request, start, ("suffix",), draft, path, (9,), 8, 1, 1 + len(draft), 12, 3400, None)


@contextmanager
def recording(store: Shelf, **options: Any) -> Iterator[Recorder]:
    recorder = Recorder(store, **options)
    try:
        yield recorder
    finally:
        store.free.set()
        assert recorder.close(WAIT_S)


CHAIN = Draft((5, 6, 7), None, ("suffix", "suffix", "ngram"), q=torch.zeros(3, 4))
TREE = Draft((5, 6, 7), (-1, -1, 1), ("suffix", "ngram", "suffix"))


def test_a_round_without_its_tokens() -> None:
    found = without_tokens(round_record(a_round("r", CHAIN, (0, 1)), 3))
    assert found == RoundRecord("r", 3, 4, 8, 3, 2, 1, 1, 4, 12, 3400, (("suffix", 2), ("ngram", 1)))


def test_a_round_with_its_tokens_and_its_tree() -> None:
    found = round_record(a_round("r", TREE, (1, 2)), 0)
    assert (found.draft_tokens, found.tokens) == ((5, 6, 7), (9,))
    assert (found.parents, found.path) == ((-1, -1, 1), (1, 2))
    assert found.sources == (("suffix", 1), ("ngram", 1), ("suffix", 1))


def test_without_text_keeps_numbers_only() -> None:
    sent = {
        "temperature": 0.5,
        "ignore_eos": True,
        "logprobs": None,
        "stop": ["SECRET"],
        "prediction": {"content": "SECRET"},
        "prompt": [1, 2, 3],
        "user": "SECRET",
        "speculative_config": {"drafters": ["suffix"]},
        "logit_bias": {"7": 1.0},
    }
    full = a_request(
        "r", params=sent, messages=["SECRET"], prompt="SECRET", tools=["SECRET"], output="SECRET",
        prompt_ids=(1,), output_ids=(2,), metadata={"run": "7"},
    )  # fmt: skip
    bare = without_text(full)
    assert "SECRET" not in repr(bare)
    assert bare.metadata == {"run": "7"}
    assert (bare.prompt_ids, bare.output_ids) == (None, None)
    assert list(bare.params) == ["temperature", "ignore_eos", "logprobs", "speculative_config", "logit_bias"]
    assert without_text(a_request("r")) == a_request("r")


def test_saves_a_request_with_its_own_rounds_in_order() -> None:
    shelf = Shelf()
    with recording(shelf) as recorder:
        for start in range(3):
            recorder.round(a_round("one", CHAIN, (0,), start))
            recorder.round(a_round("two", start=10 + start))
        recorder.finish(Seq("one", [1], 1), "stop")
        recorder.finished(a_request("one", prompt="SECRET"))
        recorder.finished(a_request("named otherwise"), "two")
    record, rounds = shelf.saved["one"]
    assert [(r.index, r.start, r.tokens) for r in rounds] == [(0, 0, None), (1, 1, None), (2, 2, None)]
    assert record.prompt is None
    assert [r.start for r in shelf.saved["named otherwise"][1]] == [10, 11, 12]
    assert (recorder.saved, recorder.dropped, recorder.failed) == (2, 0, 0)
    assert recorder._held == 0


def test_keeps_text_where_it_is_switched_on() -> None:
    shelf = Shelf()
    with recording(shelf, with_text=True) as recorder:
        recorder.round(a_round("r"))
        recorder.finished(a_request("r", prompt="said"))
    record, rounds = shelf.saved["r"]
    assert record.prompt == "said"
    assert rounds[0].tokens == (9,)


@pytest.mark.parametrize("usual", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_one_request_may_differ(usual: bool, wanted: bool | None) -> None:
    shelf = Shelf()
    with recording(shelf, with_text=usual) as recorder:
        recorder.round(a_round("r", CHAIN))
        recorder.finished(a_request("r", prompt="said"), with_text=wanted)
    record, rounds = shelf.saved["r"]
    kept = usual if wanted is None else wanted
    assert record.prompt == ("said" if kept else None)
    assert (rounds[0].tokens, rounds[0].draft_tokens) == (((9,), (5, 6, 7)) if kept else (None, None))


def test_a_slow_store_delays_nobody_and_the_oldest_are_kept() -> None:
    shelf = Shelf()
    shelf.free.clear()
    with recording(shelf, max_waiting=3) as recorder:
        for i in range(10):
            recorder.round(a_round(f"r{i}"))
            recorder.finished(a_request(f"r{i}"))
        assert not shelf.saved  # all ten are told, and the store holds the first
        assert recorder.dropped == 7
    assert list(shelf.saved) == ["r0", "r1", "r2"]
    assert recorder._held == 0


@pytest.mark.parametrize("error", [StoreError("the disk is full"), RuntimeError("SECRET")])
def test_a_broken_store_is_counted_and_logged_once_a_minute(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    shelf.broken = error
    with caplog.at_level(logging.WARNING), recording(shelf) as recorder:
        for i in range(5):
            recorder.finished(a_request(f"r{i}"))
        wait_for(lambda: recorder.failed == 5)
        assert len(caplog.records) == 1
        assert ("the disk is full" in caplog.text) == isinstance(error, StoreError)
        assert "SECRET" not in caplog.text
        monkeypatch.setattr(recorder_module, "SECONDS_BETWEEN_LOGS", 0.0)
        recorder.finished(a_request("r5"))
        wait_for(lambda: len(caplog.records) == 2)
        shelf.broken = None
        recorder.finished(a_request("r6"))
    assert (recorder.saved, recorder.failed, list(shelf.saved)) == (1, 6, ["r6"])


def test_nonsense_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    with recording(Shelf()) as recorder:
        recorder.round(None)  # type: ignore[arg-type]
        recorder.finished(None)  # type: ignore[arg-type]
        assert recorder.failed == 2


def test_rounds_nobody_asks_for_are_forgotten_but_running_ones_stay() -> None:
    shelf = Shelf()
    with recording(shelf, max_open=10, max_rounds=50) as recorder:
        for i in range(200):
            recorder.round(a_round("running", start=i % 30))
            recorder.round(a_round(f"lost {i}"))
            if i % 30 == 29:
                recorder.finished(a_request(f"done {i}"), "running")
                wait_for(lambda: not recorder._waiting)
            assert len(recorder._open) <= 10
            assert recorder._held <= 50
    assert len(shelf.saved) == 6
    assert all([r.start for r in rounds] == list(range(30)) for _, rounds in shelf.saved.values())


def test_prunes_at_the_start_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    monkeypatch.setattr(recorder_module, "SAVES_BETWEEN_PRUNES", 4)
    with recording(shelf) as recorder:
        wait_for(lambda: shelf.prunes == 1)
        for i in range(12):
            recorder.finished(a_request(f"r{i}"))
        wait_for(lambda: shelf.prunes == 4)


def test_prunes_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    monkeypatch.setattr(recorder_module, "SECONDS_BETWEEN_PRUNES", 0.01)
    with recording(shelf):
        wait_for(lambda: shelf.prunes >= 3)


def test_close_says_whether_all_is_saved_and_what_comes_later_is_dropped() -> None:
    shelf = Shelf()
    shelf.free.clear()
    with recording(shelf) as recorder:
        recorder.finished(a_request("r"))
        assert not recorder.close(0.05)
        shelf.free.set()
        assert recorder.close(WAIT_S)
        recorder.finished(a_request("late"))
        assert (list(shelf.saved), recorder.dropped) == (["r"], 1)


def test_with_a_real_store(tmp_path: Path) -> None:
    with closing(Store.open(str(tmp_path / "t.db"))) as store:
        recorder = Recorder(store)
        record = replace(a_request("r"), created=time.time())
        recorder.round(a_round("r", TREE, (1,)))
        recorder.finished(record)
        recorder.finished(record)  # the same id again: refused by the store
        assert recorder.close(WAIT_S)
        assert (recorder.saved, recorder.failed) == (1, 1)
        assert store.get("r") == (record, (without_tokens(round_record(a_round("r", TREE, (1,)), 0)),))


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    assert true()
