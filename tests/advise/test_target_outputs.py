"""Answers of a tiny model to recorded requests, with what the prefix cache would hold."""

from pathlib import Path
from statistics import fmean

import pytest

from paceline.advise.replay import Simulation
from paceline.advise.target_outputs import (
    PLAIN_ANSWERS,
    OutputLimits,
    TargetOutput,
    plain_rounds,
    target_outputs,
)
from paceline.advise.traffic import TracedRequest, turns_before
from paceline.config import EngineConfig, SpecConfig
from paceline.engine.control import Fixed
from paceline.llm import LLM
from support.servers import toy_chat_model

LIMITS = OutputLimits(max_tokens=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = toy_chat_model(tmp_path_factory.mktemp("toy"))
    return path


def toy(model: Path) -> LLM:
    config = EngineConfig("cpu", cache_mb=64)
    return LLM(str(model), spec=SpecConfig(("ngram",), 8, adaptive=False), config=config)


def turns(count: int) -> list[TracedRequest]:
    """One conversation."""
    words = [{"role": role, "content": f"a word {i}"} for i in range(count) for role in ("user", "assistant")]
    return [
        TracedRequest(f"c#{i}", "chat", "c", {"messages": words[: 2 * i + 1], "temperature": 0.8})
        for i in range(count)
    ]


def answered(model: Path, requests: list[TracedRequest], chosen: list[TracedRequest]) -> list[TargetOutput]:
    found, left_out = target_outputs(toy(model), chosen, LIMITS, before=turns_before(requests))
    assert not left_out
    return found


def test_the_turn_before_is_read_first(model: Path) -> None:
    """A turn from the middle of a conversation finds as much in the cache as if all had been answered."""
    requests = turns(4)
    everything = answered(model, requests, requests)
    (alone,) = answered(model, requests, requests[3:])
    (cold,) = target_outputs(toy(model), requests[3:], LIMITS)[0]
    assert everything[0].recorded.cached == cold.recorded.cached == 0
    assert alone.recorded.cached == everything[3].recorded.cached > 0
    assert alone.recorded.output == everything[3].recorded.output == cold.recorded.output


def test_a_replay_of_answers_has_their_rounds(model: Path) -> None:
    llm, requests = toy(model), turns(6)
    outputs, _ = target_outputs(llm, requests, LIMITS, before=turns_before(requests))
    made = Simulation(llm.spec, llm.target, {"ngram": llm.drafters["ngram"]}, Fixed(), lambda n, c: 1.0)
    for one, done in zip(outputs, made.run([one.recorded for one in outputs]), strict=True):
        assert done.passes == len(one.rounds) - 1
        assert done.tokens == sum(len(r.tokens) for r in one.rounds[1:])
    assert fmean(len(r.tokens) for one in outputs for r in one.rounds) > 1  # else nothing was compared


def test_passes_of_one_row_are_timed_without_drafts(model: Path) -> None:
    llm, requests = toy(model), turns(6)
    outputs, _ = target_outputs(llm, requests, LIMITS)
    found = plain_rounds(llm, outputs)
    assert len(found) == PLAIN_ANSWERS
    for one, rounds in zip(outputs, found, strict=False):
        assert all(r.rows == 1 for r in rounds[1:])
        tokens = [token for r in rounds for token in r.tokens]
        assert tokens == list(one.recorded.output[: len(tokens)])
    assert not plain_rounds(llm, [])
