"""A mirrored pair without texts still has scores, and the lead at the first difference."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.gate.pair import Pair
from paceline.gate.store import GateStore
from support.scripted_model import last_words, scripted
from support.servers import IDLE_S, until
from support.upstreams import gate


def mirrored(
    folder: Path, base: str, cand: str, judge: dict[str, Any] | None = None, requests: int = 1, **request: Any
) -> list[Pair]:
    """The pairs of requests, one conversation each."""
    mirror = {"candidate": "cand", "share": 1.0, **({"judge": judge} if judge else {})}
    route = {"name": "all", "upstreams": {"base": 1}, "mirror": mirror}
    upstreams = [{"name": "base", "url": base}, {"name": "cand", "url": cand}]
    config = {"upstreams": upstreams, "routes": [route]}
    with gate(folder, config, store=str(folder / "gate.db")) as running:
        for number in range(requests):
            messages: Any = [{"role": "user", "content": f"hello {number}"}]
            running.client().chat.completions.create(model="m", messages=messages, **request)
        store = GateStore.open(str(folder / "gate.db"))
        until(lambda: store.count("all-cand") >= requests, IDLE_S)
        pairs = list(store.pairs("all-cand"))
        store.close()
    return pairs


def test_mirrored_answers_are_scored_though_their_texts_are_not_recorded(tmp_path: Path) -> None:
    with scripted(lambda _: "one two") as (base, _), scripted(lambda _: "{}") as (cand, _):
        format_ = {"type": "json_object"}
        (pair,) = mirrored(tmp_path, base, cand, response_format=format_, stop=["two"], temperature=1)
    assert pair.candidate.text is None
    assert pair.baseline.scores == {"stops_respected": 0.0, "schema_valid": 0.0}
    assert pair.candidate.scores == {"stops_respected": 1.0, "schema_valid": 1.0}


@pytest.mark.parametrize("lead", [0.01, 2.0])
def test_the_first_difference_of_greedy_answers_has_the_baselines_lead(tmp_path: Path, lead: float) -> None:
    top = [{"token": " two", "logprob": -0.5}, {"token": " four", "logprob": -0.5 - lead}]
    tokens = [{"token": "one", "logprob": -0.1, "top_logprobs": []}, {**top[0], "top_logprobs": top}]
    with (
        scripted(lambda _: "one two", logprobs=tokens) as (base, model),
        scripted(lambda _: "one four") as (cand, _),
    ):
        (pair,) = mirrored(tmp_path, base, cand, temperature=0)
    assert pair.divergence is not None
    assert pair.divergence.token == 1
    assert pair.divergence.margin == pytest.approx(lead)
    assert len(model.requests) == 2  # the user's, and the one that explains


def test_a_judge_model_scores_so_many_pairs_a_minute_off_the_users_path(tmp_path: Path) -> None:
    def grade(request: dict[str, Any]) -> str:
        return json.dumps({"score": 9 if "good" in json.loads(last_words(request))["answer"] else 2})

    with (
        scripted(lambda _: "good") as (base, _),
        scripted(lambda _: "bad") as (cand, _),
        scripted(grade) as (url, judge),
    ):
        chosen = {"url": url, "share": 1.0, "max_per_minute": 2}
        pairs = mirrored(tmp_path, base, cand, chosen, requests=4, temperature=1)
    scored = [pair for pair in pairs if "judge" in pair.baseline.scores]
    assert [(p.baseline.scores["judge"], p.candidate.scores["judge"]) for p in scored] == [(0.9, 0.2)] * 2
    assert len(judge.requests) == 4
    assert all(request["temperature"] == 0 for request in judge.requests)
    assert all(pair.baseline.text is None for pair in pairs)
