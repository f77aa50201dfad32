"""Batches: the order of prompts, failures among them, bounded reading, the progress bar."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, BatchError, EngineConfig, Result, SpecConfig
from paceline.batches import window
from paceline.errors import PromptTooLong, SettingError, UsageError
from paceline.types import Round, Seq
from support.servers import toy_chat_model

PROMPTS = ["a b c d", "the cat sat", "one two three", "x y z x y z x y"]
SETTINGS: dict[str, Any] = {"max_tokens": 6, "seed": 1, "ignore_eos": True}
TOO_LONG = [5] * 200
PLAIN = SpecConfig(("none",), max_draft=0)


class Seen:
    """A sink."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.batches: list[int] = []

    def round(self, r: Round) -> None:
        self.batches.append(r.batch)

    def finish(self, seq: Seq, reason: str) -> None:
        self.ended.append(seq.id)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, seen: Seen) -> LLM:
    path: Path = toy_chat_model(tmp_path_factory.mktemp("toy"))
    return LLM(
        str(path), config=EngineConfig("cpu", cache_mb=64, max_batch=3, max_model_len=128), sinks=[seen]
    )


def test_answers_are_those_of_the_prompts_alone_in_their_order(toy: LLM, seen: Seen) -> None:
    alone = [toy.generate(prompt, **SETTINGS).token_ids for prompt in PROMPTS]
    seen.batches.clear()
    assert [answer.token_ids for answer in toy.batch(PROMPTS * 5, **SETTINGS)] == alone * 5
    assert max(seen.batches) == 3


def test_prompts_are_read_as_places_become_free(toy: LLM, seen: Seen) -> None:
    seen.ended.clear()
    open_requests: list[int] = []  # whenever another prompt is read

    def prompts() -> Iterator[str]:
        for i in range(40):
            open_requests.append(i - len(seen.ended))
            yield f"number {i}"

    assert len(toy.batch(prompts(), **SETTINGS)) == 40
    assert max(open_requests) == window(toy.engine.config) - 1 == 5


def test_a_long_answer_does_not_keep_the_others_waiting(toy: LLM, seen: Seen) -> None:
    """All but the first prompt leave room for few tokens."""
    seen.ended.clear()
    answers = toy.batch([[5, 6], *[[7] * 122] * 12], max_tokens=100, ignore_eos=True, spec=PLAIN)
    assert [answer.output_tokens for answer in answers] == [100, *[6] * 12]
    assert seen.ended[-1] == min(seen.ended, key=lambda id: int(id[1:]))  # the first to come


@pytest.mark.parametrize("max_waiting", [1, 2, 100])
def test_a_bound_of_the_queue_is_kept(tmp_path: Path, max_waiting: int) -> None:
    config = EngineConfig("cpu", cache_mb=64, max_batch=2, max_waiting=max_waiting)
    llm = LLM(str(toy_chat_model(tmp_path)), config=config)
    assert len(llm.batch(PROMPTS * 2, **SETTINGS)) == 8


def test_a_failure_does_not_lose_the_others(toy: LLM) -> None:
    given: list[Any] = [PROMPTS[0], "", TOO_LONG, PROMPTS[1]]
    with pytest.raises(BatchError) as caught:
        toy.batch(given, **SETTINGS)
    assert str(caught.value).startswith("2 of 4 prompts failed, prompts[1] first: prompt='' is not usable")
    kinds = [type(outcome) for outcome in caught.value.results]
    assert kinds == [Result, SettingError, PromptTooLong, Result]
    outcomes = toy.batch(given, return_exceptions=True, **SETTINGS)
    assert [type(outcome) for outcome in outcomes] == kinds
    assert not toy.engine.busy


def test_what_is_wrong_with_all_prompts_is_an_error_of_its_own_kind(toy: LLM) -> None:
    with pytest.raises(UsageError, match="unknown setting 'temprature'; did you mean 'temperature'"):
        toy.batch(PROMPTS, temprature=1.0)
    for prompts in ("abc", 7):
        with pytest.raises(SettingError, match="a list of prompts; for one prompt use generate"):
            toy.batch(prompts)  # type: ignore[arg-type]
    assert toy.batch([]) == []


def test_a_batch_beside_an_open_stream_leaves_that_alone(toy: LLM) -> None:
    stream = toy.stream(PROMPTS[0], **SETTINGS)
    toy.batch(PROMPTS, **SETTINGS)
    assert stream.read().token_ids == toy.generate(PROMPTS[0], **SETTINGS).token_ids


def test_progress_is_drawn_on_terminals_only(
    toy: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.batch(PROMPTS, progress=True, **SETTINGS)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich
    monkeypatch.setenv("COLUMNS", "120")
    toy.batch(PROMPTS, **SETTINGS)
    assert capsys.readouterr() == ("", "")
    toy.batch([*PROMPTS, ""], progress=True, return_exceptions=True, **SETTINGS)
    out, err = capsys.readouterr()
    assert out == ""
    assert "5/5" in err
    assert "24 tokens" in err
    assert "1 failed" in err
