"""Stored requests as the page reads them: runs, two runs compared, one trace, and who may see them."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.trace.store import Store
from paceline.web import api_keys
from support.servers import IDLE_S, NAME, Running, always_draft, toy_running, until
from support.traces import a_request, rounds_of

OPENING = [{"role": "system", "content": "<script>alert(1)</script>"}, {"role": "user", "content": "Hello"}]
TURNS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    file = folder / "keys.json"
    named = {name: api_keys.add(file, name) for name in ("anna", "bo")}
    return {**named, "olga": api_keys.add(file, "olga", operator=True)}


@pytest.fixture(scope="module")
def server(folder: Path, keys: dict[str, str]) -> Iterator[Running]:
    """Anna has run a conversation plainly and with drafters, Bo has asked once."""
    with toy_running(
        folder,
        keys=str(folder / "keys.json"),
        store=str(folder / "traces.db"),
        trace_text=True,
        advice=str(folder / "advice.json"),
        extend=always_draft,
    ) as found:
        for config in ({"disabled": True}, {"drafters": ["suffix"]}):
            converse(found, keys["anna"], config)
        post(found, keys["bo"], [{"role": "user", "content": "Hello"}])
        assert until(lambda: len(get(found, keys["olga"], "/page/runs")["runs"]) == 3, IDLE_S)
        yield found


def post(server: Running, key: str, messages: list[Any], **body: Any) -> str:
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0, **body},
        headers={"authorization": f"Bearer {key}"},
        trust_env=False,
        timeout=IDLE_S,
    )
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"] or "")


def converse(server: Running, key: str, config: dict[str, Any]) -> None:
    messages: list[Any] = list(OPENING)
    for turn in range(TURNS):
        text = post(server, key, messages, speculative_config=config)
        said = [{"role": "assistant", "content": text}, {"role": "user", "content": f"And then {turn}?"}]
        messages = [*messages, *said]


def fetch(server: Running, key: str, path: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{server.url}{path}", headers=headers, trust_env=False, timeout=IDLE_S)


def get(server: Running, key: str, path: str) -> Any:
    response = fetch(server, key, path)
    assert response.status_code == 200, response.text
    return response.json()


def annas_runs(server: Running, keys: dict[str, str]) -> tuple[str, str]:
    """The plain one, the drafted one."""
    drafted, plain = get(server, keys["anna"], "/page/runs")["runs"]
    assert plain["plain"]
    assert drafted["drafters"] == ["suffix"]
    return plain["id"], drafted["id"]


def test_turns_of_a_conversation_are_one_run_and_runs_with_other_drafters_others(
    server: Running, keys: dict[str, str]
) -> None:
    runs = get(server, keys["anna"], "/page/runs")["runs"]
    assert [run["turns"] for run in runs] == [TURNS, TURNS]
    assert len({run["conversation"] for run in runs}) == 1


def test_a_run_has_its_turns_and_the_other_runs_of_its_conversation(
    server: Running, keys: dict[str, str]
) -> None:
    plain, drafted = annas_runs(server, keys)
    found = get(server, keys["anna"], f"/page/runs/{drafted}")
    assert [other["id"] for other in found["others"]] == [plain]
    turns = found["run"]["turns"]
    assert [turn["output_tokens"] for turn in turns] == [8] * TURNS
    assert turns[1]["cached_tokens"] > 0
    for turn in turns:
        assert sum(turn["phases"].values()) == pytest.approx(turn["seconds"])
    middle = turns[1]["id"]
    assert get(server, keys["anna"], f"/page/runs/{middle}")["run"] == found["run"]


def test_plain_and_speculative_compare_as_identical(server: Running, keys: dict[str, str]) -> None:
    plain, drafted = annas_runs(server, keys)
    found = get(server, keys["anna"], f"/page/runs/{plain}/{drafted}")
    assert found["baseline"]["summary"]["id"] == plain
    assert (found["comparison"]["same"], found["comparison"]["differing"]) == (TURNS, 0)
    assert found["comparison"]["speedup"] > 0


def test_a_trace_is_what_the_command_prints_with_the_start_of_each_round(
    server: Running, keys: dict[str, str], folder: Path
) -> None:
    _, drafted = annas_runs(server, keys)
    found = get(server, keys["anna"], f"/page/traces/{drafted}")
    with closing(Store.open(str(folder / "traces.db"))) as store:
        stored = store.get(drafted)
    assert stored is not None
    record, rounds = stored
    assert found["messages"][0] == OPENING[0]
    assert found["output"] == record.output
    assert [r["target_us"] for r in found["rounds"]] == [r.target_us for r in rounds]
    starts = [r["at_s"] for r in found["rounds"]]
    assert starts == sorted(starts)
    assert "prompt_ids" not in found


def test_a_key_sees_its_own_requests_and_an_operator_all(server: Running, keys: dict[str, str]) -> None:
    assert len(get(server, keys["olga"], "/page/runs")["runs"]) == 3
    (bos,) = get(server, keys["bo"], "/page/runs")["runs"]
    plain, drafted = annas_runs(server, keys)
    for path in (f"runs/{plain}", f"runs/{plain}/{drafted}", f"runs/{bos['id']}/{plain}", f"traces/{plain}"):
        assert fetch(server, keys["bo"], f"/page/{path}").status_code == 404, path
        assert fetch(server, keys["olga"], f"/page/{path}").status_code == 200, path
        assert fetch(server, "", f"/page/{path}").status_code == 401, path
    assert get(server, keys["bo"], f"/page/traces/{bos['id']}")["client"] == "bo"


def test_the_beginning_of_an_id_tells_nothing(server: Running, keys: dict[str, str]) -> None:
    plain, _ = annas_runs(server, keys)
    for id in (plain[:-1], "chatcmpl-", "%"):
        assert fetch(server, keys["olga"], f"/page/traces/{id}").status_code == 404


def test_a_request_without_a_conversation_is_a_run_of_its_own(
    server: Running, keys: dict[str, str], folder: Path
) -> None:
    with closing(Store.open(str(folder / "traces.db"))) as store:
        record = a_request("old", client="olga", output="x")
        store.save(record, rounds_of(record))
    found = get(server, keys["olga"], "/page/runs/old")
    assert len(found["run"]["turns"]) == 1
    assert found["others"] == []


def test_advice_is_the_file_as_it_is_now_and_for_operators(
    server: Running, keys: dict[str, str], folder: Path
) -> None:
    file = folder / "advice.json"
    assert fetch(server, keys["olga"], "/page/advice").status_code == 503
    for target in ("one", "two"):
        file.write_text(json.dumps({"target": target, "routes": []}))
        assert get(server, keys["olga"], "/page/advice")["report"]["target"] == target
    assert get(server, keys["anna"], "/page/advice") == {"configured": True, "report": None}
    file.write_text("[]")
    assert fetch(server, keys["olga"], "/page/advice").status_code == 503


def test_a_server_that_keeps_no_traces_says_so(toy_server: Running) -> None:
    assert get(toy_server, "", "/page/runs") == {"runs": [], "requests": 0, "stored": False}
    assert fetch(toy_server, "", "/page/traces/x").status_code == 404
    assert get(toy_server, "", "/page/advice") == {"configured": False, "report": None}
