"""A mirrored pair without texts still has scores, and the lead at the first difference."""

from pathlib import Path
from typing import Any

import pytest

from paceline.gate.pair import Pair
from paceline.gate.store import GateStore
from support.scripted_model import scripted
from support.servers import IDLE_S, until
from support.upstreams import gate


def mirrored(folder: Path, base: str, cand: str, **request: Any) -> Pair:
    """The pair of one request."""
    route = {"name": "all", "upstreams": {"base": 1}, "mirror": {"candidate": "cand", "share": 1.0}}
    upstreams = [{"name": "base", "url": base}, {"name": "cand", "url": cand}]
    config = {"upstreams": upstreams, "routes": [route]}
    with gate(folder, config, store=str(folder / "gate.db")) as running:
        messages: Any = [{"role": "user", "content": "hello"}]
        running.client().chat.completions.create(model="m", messages=messages, **request)
        store = GateStore.open(str(folder / "gate.db"))
        until(lambda: store.count("all-cand") > 0, IDLE_S)
        (pair,) = store.pairs("all-cand")
        store.close()
    return pair


def test_mirrored_answers_are_scored_though_their_texts_are_not_recorded(tmp_path: Path) -> None:
    with scripted(lambda _: "one two") as (base, _), scripted(lambda _: "{}") as (cand, _):
        format_ = {"type": "json_object"}
        pair = mirrored(tmp_path, base, cand, response_format=format_, stop=["two"], temperature=1)
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
        pair = mirrored(tmp_path, base, cand, temperature=0)
    assert pair.divergence is not None
    assert pair.divergence.token == 1
    assert pair.divergence.margin == pytest.approx(lead)
    assert len(model.requests) == 2  # the user's, and the one that explains
