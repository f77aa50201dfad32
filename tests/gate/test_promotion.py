"""Stages, audit and roll-back; gates that share a PostgreSQL store agree."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml
from sqlalchemy import insert

from paceline.gate.pair import Feedback, Pair
from paceline.gate.policy import Policy
from paceline.gate.promotion import Plan, Promoter, next_step
from paceline.gate.store import GateStore, Rollout, Served
from paceline.trace.store.schema import PAIRS
from support import traces
from support.clients import run
from support.gate_pairs import pairs
from support.servers import COMMAND, IDLE_S, START_S, free_port, until
from support.upstreams import upstream

STAGES = (0.1, 0.25, 0.5, 1.0)
PLAN = Plan("x", STAGES, min_pairs=50, check_every_s=0.0, automatic=True, policy=Policy())


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "gate.db")
    return database(request.getfixturevalue("postgres"))


def database(server: str) -> str:
    name = f"gate_{uuid4().hex}"
    traces.execute(server.format("postgres"), f"CREATE DATABASE {name}")
    return server.format(name)


def of_now(made: list[Pair], experiment: str = "x") -> list[Pair]:
    """With ids and times of their own."""
    return [
        replace(pair, id=uuid4().hex, created=time.time(), experiment=experiment, route="all")
        for pair in made
    ]


def good(count: int = 400) -> list[Pair]:
    return of_now(pairs(count, 0.5, spread=0.1))


def slower() -> list[Pair]:
    return of_now(pairs(200, 1.5, spread=0.1))


def save(store: GateStore, made: list[Pair]) -> None:
    """As `save_pair` does, in one transaction."""
    rows = [
        {"id": pair.id, "created": pair.created, "experiment": pair.experiment, "pair": asdict(pair)}
        for pair in made
    ]
    with store.traces.transaction("pairs", writes=True) as connection:
        connection.execute(insert(PAIRS), rows)


@pytest.mark.parametrize(
    ("rollout", "decision", "count", "expected"),
    [
        (Rollout("x"), "promote", 50, ("promoting", 0.1)),
        (Rollout("x"), "promote", 49, None),
        (Rollout("x"), "hold", 5000, None),
        (Rollout("x", "promoting", 0.1), "promote", 50, ("promoting", 0.25)),
        (Rollout("x", "promoting", 0.3), "promote", 50, ("promoting", 0.5)),
        (Rollout("x", "promoting", 0.5), "promote", 50, ("promoted", 1.0)),
        (Rollout("x", "promoted", 1.0), "promote", 50, None),
        (Rollout("x", "promoted", 1.0), "roll back", 1, ("rolled_back", 0.0)),
        (Rollout("x"), "roll back", 1, ("rolled_back", 0.0)),
        (Rollout("x", "rolled_back", 0.0), "promote", 500, None),
        (Rollout("x", "rolled_back", 0.0), "roll back", 500, None),
    ],
)
def test_the_verdict_moves_a_rollout_by_one_stage(
    rollout: Rollout, decision: Any, count: int, expected: tuple[str, float] | None
) -> None:
    assert next_step(rollout, decision, count, PLAN) == expected


def test_of_two_writers_that_saw_the_same_version_one_changes_it(url: str) -> None:
    one, two = GateStore.open(url), GateStore.open(url)
    seen = one.rollout("x")
    assert seen == two.rollout("x") == Rollout("x")
    assert one.change(seen, "promoting", 0.1, "one", "because")
    assert not two.change(seen, "rolled_back", 0.0, "two", "because not")
    now = two.rollout("x")
    assert (now.state, now.share, now.version) == ("promoting", 0.1, 1)
    assert two.change(now, "promoting", 0.25, "two", "because", {"verdict": "promote"})
    assert [(c.actor, c.from_share, c.to_share) for c in one.changes("x")] == [
        ("one", 0.0, 0.1),
        ("two", 0.1, 0.25),
    ]
    assert one.changes("x")[1].verdict == {"verdict": "promote"}
    one.close()
    two.close()


def test_pairs_and_feedback_come_back_as_they_were_saved_and_old_ones_go(url: str) -> None:
    store = GateStore.open(url)
    made = good(3)
    for pair in made:
        store.save_pair(pair)
    assert list(store.pairs("x")) == made
    assert list(store.pairs("x", since=time.time() + 1)) == []
    assert store.count("x") == 3
    answered = Served("req", "chatcmpl", 5.0, "alice", "x", "all", "eu", "candidate")
    store.save_served(answered)
    assert store.served("req") == store.served("chatcmpl") == answered
    assert store.served("other") is None
    word = Feedback(request="req", arm="candidate", created=time.time(), thumbs="down", route="all")
    store.save_feedback(replace(word, thumbs="up"), "x")
    store.save_feedback(word, "x")
    assert store.feedback("x") == [word]
    assert store.prune(max_pairs=2) == 2  # a pair, and the answer of 1970
    assert list(store.pairs("x")) == made[1:]
    store.close()


@pytest.mark.slow
def test_each_stage_needs_its_own_pairs_and_harm_rolls_back_from_any(tmp_path: Path) -> None:
    url = str(tmp_path / "gate.db")
    store = GateStore.open(url)
    promoter = Promoter(store, url, lambda: {"x": PLAN})
    save(store, good())
    asyncio.run(promoter.look())
    assert promoter.share("x") == 0.1
    asyncio.run(promoter.look())
    assert promoter.share("x") == 0.1  # the pairs of the first stage prove nothing about the second
    save(store, good())
    asyncio.run(promoter.look())
    assert promoter.share("x") == 0.25
    save(store, slower())
    asyncio.run(promoter.look())
    assert store.rollout("x").state == "rolled_back"
    assert promoter.share("x") == 0.0
    assert not promoter.mirrors("x")
    save(store, good())
    asyncio.run(promoter.look())
    assert store.rollout("x").state == "rolled_back"
    last = store.changes("x")[-1]
    assert last.reason.startswith("roll back after 200 pairs")
    assert last.verdict is not None
    assert last.verdict["verdict"] == "roll back"
    store.close()


def test_a_rollout_that_is_not_automatic_waits_for_its_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, config = str(tmp_path / "gate.db"), tmp_path / "gate.yaml"
    mirror = {"candidate": "b", "experiment": "x"}
    promotion = {"automatic": False}
    route = {"name": "all", "upstreams": {"a": 1}, "mirror": mirror, "promotion": promotion}
    servers = [{"name": name, "url": "http://127.0.0.1:9"} for name in "ab"]
    config.write_text(yaml.safe_dump({"upstreams": servers, "routes": [route]}))
    missing = run(capsys, "gate", "status", "--config", str(config), "--store", url)[2]
    assert f"{url}; `paceline gate serve` makes one" in missing
    store = GateStore.open(url)
    save(store, good())
    promoter = Promoter(store, url, lambda: {"x": replace(PLAN, automatic=False)})
    asyncio.run(promoter.look())
    assert promoter.share("x") == 0
    assert "Known: x" in run(capsys, "gate", "export", "y", "--store", url)[2]
    where = ("--config", str(config), "--store", url)
    code, out, _ = run(capsys, "gate", "status", *where)
    assert code == 0
    assert "x: mirroring, the candidate serves 0% of users" in out
    assert "\n  promote after 400 pairs\n" in out  # its reasons are on lines of their own
    assert run(capsys, "gate", "set", "x", "0.25", "--reason", "looks good", *where)[0] == 0
    asyncio.run(promoter.look())
    assert promoter.share("x") == 0.25
    assert run(capsys, "gate", "rollback", "x", "--reason", "a hunch", *where)[0] == 0
    facts = json.loads(run(capsys, "gate", "status", "--json", *where)[1])
    assert facts[0]["state"] == "rolled_back"
    assert [change["reason"] for change in facts[0]["changes"]] == ["looks good", "a hunch"]
    assert run(capsys, "gate", "rollback", "y", "--reason", "typo", *where)[0] == 2
    store.close()


@contextmanager
def process(config: Path, store: str) -> Iterator[str]:
    """The URL of a gate in a process of its own."""
    port = free_port()
    options = ("--config", str(config), "--store", store, "--port", str(port), "--log-level", "warning")
    running = subprocess.Popen([*COMMAND, "gate", "serve", *options, "--drain", "0"])
    try:
        url = f"http://127.0.0.1:{port}"
        assert until(lambda: ready(url) or running.poll() is not None, START_S)
        assert running.poll() is None
        yield url
    finally:
        running.terminate()
        assert running.wait(IDLE_S) == 0


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_two_gates_on_one_postgresql_agree_on_the_stage(postgres: str, tmp_path: Path) -> None:
    url = database(postgres)
    with upstream("base") as base, upstream("cand") as cand:
        config = {
            "upstreams": [{"name": one.name, "url": one.url} for one in (base, cand)],
            "routes": [
                {
                    "name": "all",
                    "upstreams": {"base": 1},
                    "mirror": {"candidate": "cand", "experiment": "x", "share": 0.0},
                    "promotion": {"stages": [0.5, 1.0], "min_pairs": 50, "check_every_s": 0.1},
                }
            ],
        }
        file = tmp_path / "gate.yaml"
        file.write_text(yaml.safe_dump(config))
        with process(file, url) as one, process(file, url) as two:
            store = GateStore.open(url)

            def answers() -> list[list[str]]:
                return [
                    [
                        httpx.post(
                            f"{gate}/v1/chat/completions",
                            json={"model": "m", "messages": [{"role": "user", "content": f"talk {number}"}]},
                        ).json()["model"]
                        for number in range(12)
                    ]
                    for gate in (one, two)
                ]

            def shares() -> list[str]:
                pages = [httpx.get(f"{gate}/metrics").text.splitlines() for gate in (one, two)]
                name = 'paceline_gate_candidate_share{experiment="x"}'
                return [line.split()[1] for page in pages for line in page if line.startswith(name)]

            assert answers() == [["base"] * 12] * 2
            save(store, good())
            assert until(lambda: shares() == ["0.5"] * 2, 3 * IDLE_S)
            first, second = answers()
            assert first == second  # a conversation has the same arm at both
            assert set(first) == {"base", "cand"}
            save(store, good())
            assert until(lambda: shares() == ["1.0"] * 2, 3 * IDLE_S)
            assert answers() == [["cand"] * 12] * 2
            save(store, slower())
            assert until(lambda: shares() == ["0.0"] * 2, 3 * IDLE_S)
            assert answers() == [["base"] * 12] * 2
            audit = store.changes("x")
            store.close()
    assert [(change.to_state, change.to_share) for change in audit] == [
        ("promoting", 0.5),
        ("promoted", 1.0),
        ("rolled_back", 0.0),
    ]
