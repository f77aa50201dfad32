"""Scores of mirrored answers: they are computed while there are texts, and stay when these are dropped."""

from pathlib import Path
from typing import Any

from paceline.gate.store import GateStore
from support.servers import IDLE_S, until
from support.upstreams import gate, upstream


def test_mirrored_answers_are_scored_though_their_texts_are_not_recorded(tmp_path: Path) -> None:
    with upstream("base") as base, upstream("cand") as cand:
        route = {"name": "all", "upstreams": {"base": 1}, "mirror": {"candidate": "cand", "share": 1.0}}
        config = {
            "upstreams": [{"name": one.name, "url": one.url} for one in (base, cand)],
            "routes": [route],
        }
        with gate(tmp_path, config, store=str(tmp_path / "gate.db")) as running:
            messages: Any = [{"role": "user", "content": "hello"}]
            running.client().chat.completions.create(
                model="m", messages=messages, response_format={"type": "json_object"}, stop=["two"]
            )
            store = GateStore.open(str(tmp_path / "gate.db"))
            until(lambda: store.count("all-cand") > 0, IDLE_S)
            (pair,) = store.pairs("all-cand")
            store.close()
    assert pair.candidate.text is None
    assert pair.candidate.scores == pair.baseline.scores == {"stops_respected": 0.0, "schema_valid": 0.0}
