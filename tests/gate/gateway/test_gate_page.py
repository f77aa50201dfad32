"""The gate's data for its page: experiments, reports, A/A line, pairs, and who may read texts."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.gate.pair import Pair
from paceline.gate.policy import Policy
from paceline.gate.promotion import verdict_on
from paceline.gate.store import GateStore
from paceline.web.api_keys import add
from support.clients import run
from support.gate_pairs import pairs
from support.upstreams import Gate, gate

HOSTILE = "some <script>alert(1)</script>"


def differing(i: int, pair: Pair) -> Pair:
    return replace(pair, candidate=replace(pair.candidate, text=HOSTILE)) if i == 3 else pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    file = folder / "keys.json"
    return {"anna": add(file, "anna"), "olga": add(file, "olga", operator=True)}


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    mirror = {"candidate": "cand", "experiment": "new", "share": 0.5, "text": True}
    promotion = {"automatic": False, "policy": {"min_speedup": 1.05}}
    control = {"candidate": "base", "experiment": "control", "share": 0.1}
    return {
        "upstreams": [{"name": name, "url": "http://127.0.0.1:9"} for name in ("base", "cand")],
        "routes": [
            {"name": "control", "match": {"model": "c"}, "upstreams": {"base": 1}, "mirror": control},
            {"name": "all", "upstreams": {"base": 1}, "mirror": mirror, "promotion": promotion},
        ],
    }


@pytest.fixture(scope="module")
def served(folder: Path, keys: dict[str, str], config: dict[str, Any]) -> Iterator[Gate]:
    url = str(folder / "gate.db")
    with closing(GateStore.open(url)) as store:
        for name, made in (("new", pairs(60, 0.7, change=differing)), ("control", pairs(40))):
            for pair in made:
                store.save_pair(replace(pair, id=f"{name}-{pair.id}", experiment=name, created=time.time()))
    with gate(folder, config, store=url, keys=str(folder / "keys.json")) as running:
        yield running


def fetch(served: Gate, path: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{served.url}{path}", headers=headers, trust_env=False, timeout=120)


def get(served: Gate, path: str, key: str) -> Any:
    response = fetch(served, path, key)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_gate_serves_the_page_with_its_own_views(served: Gate, keys: dict[str, str]) -> None:
    index = fetch(served, "/")
    assert index.status_code == 200
    assert "content-security-policy" in index.headers
    assert fetch(served, "/page/about").status_code == 401
    assert get(served, "/page/about", keys["anna"])["views"] == ["gate"]


def test_experiments_have_their_rollout_and_the_health_of_their_mirror(
    served: Gate, keys: dict[str, str]
) -> None:
    served.app.metrics.mirrored("all", "recorded")
    served.app.metrics.mirrored("all", "queue_full")
    served.app.metrics.finished("all", "base", "http_200", 0.1, 0.2, 1)
    control, new = get(served, "/page/gate", keys["anna"])["experiments"]
    assert (control["aa"], new["aa"]) == (True, False)
    assert (control["rollout"], new["rollout"]["state"]) == (None, "mirroring")
    assert (new["pairs"], new["mirrored_share"]) == (60, 0.5)
    assert new["health"]["outcomes"] == {"recorded": 1, "queue_full": 1}
    assert new["health"]["recorded_share"] == 1.0


def test_the_report_is_the_verdict_of_gate_status_beside_the_aa_line(
    served: Gate, keys: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = get(served, "/page/gate/new", keys["olga"])
    url = str(folder / "gate.db")
    status = run(capsys, "gate", "status", "--json", "--config", str(folder / "gate.yaml"), "--store", url)[1]
    (facts,) = json.loads(status)
    assert {name: found[name] for name in ("verdict", "missing_pairs", "reasons")} == {
        name: facts[name] for name in ("verdict", "missing_pairs", "reasons")
    }
    with closing(GateStore.open(url)) as store:
        expected = verdict_on(store, "new", 0.0, Policy(min_speedup=1.05))
    assert [f["estimate"] for f in found["findings"]] == [f.estimate for f in expected.findings]
    (line,) = found["aa"]
    assert (line["experiment"], line["verdict"], line["pairs"]) == ("control", "hold", 40)
    assert line["evidence"][0]["name"] == "TPOT"


def test_texts_are_for_operators(served: Gate, keys: dict[str, str]) -> None:
    olga, anna = (get(served, "/page/gate/new", keys[name]) for name in ("olga", "anna"))
    assert (olga["texts"], anna["texts"]) == (True, False)
    assert olga["shown_pairs"][0]["candidate"]["output"] == HOSTILE
    assert "script" not in json.dumps(anna)
    assert olga["findings"] == anna["findings"]
    path = "/page/gate/new/pairs/new-p3"
    assert get(served, path, keys["olga"])["divergence"]["character"] == len("some ")
    assert get(served, path, keys["anna"])["candidate"]["output"] is None


def test_unknown_experiments_and_pairs_are_not_there(served: Gate, keys: dict[str, str]) -> None:
    assert fetch(served, "/page/gate/other", keys["olga"]).status_code == 404
    assert fetch(served, "/page/gate/new/pairs/control-p1", keys["olga"]).status_code == 404
    assert fetch(served, "/page/gate/new").status_code == 401


def test_without_keys_a_gate_that_others_reach_shows_no_texts(
    tmp_path: Path, folder: Path, config: dict[str, Any], served: Gate
) -> None:
    store = str(folder / "gate.db")
    for hosts, texts in (((), True), (("gate.example",), False)):
        with gate(tmp_path, config, store=store, allowed_hosts=hosts) as running:
            found = get(running, "/page/gate/new/pairs/new-p3", "")
            assert (found["candidate"]["output"] is not None) is texts
