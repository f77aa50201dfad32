"""/page/live and /page/hour: who sees which requests, and figures that are those of /metrics."""

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from paceline.server.page import live
from paceline.server.page.live import MAX_RECORDS, by_minute, histogram_quantile, read_figures
from paceline.trace.record import RequestRecord
from paceline.web import api_keys
from support.servers import IDLE_S, Running, always_draft, paused, toy_running, until

LONG = {"messages": [{"role": "user", "content": "a b a b a b"}], "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    made = {name: api_keys.add(file, name) for name in ("anna", "bert")}
    return {"file": str(file), **made, "olga": api_keys.add(file, "olga", operator=True)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Running]:
    """Its figures are read at every look, not shared for some time."""
    folder = tmp_path_factory.mktemp("live")
    with (
        pytest.MonkeyPatch.context() as patch,
        toy_running(
            folder, keys=keys["file"], store=f"sqlite:///{folder}/traces.db", extend=always_draft
        ) as found,
    ):
        patch.setattr(live, "FIGURES_S", 0.0)
        patch.setattr(live, "HOUR_EVERY_S", 0.0)
        yield found


def get(server: Running, path: str, key: str) -> Any:
    response = httpx.get(f"{server.url}{path}", headers=bearer(key), trust_env=False, timeout=IDLE_S)
    assert response.status_code == 200, response.text
    return response.json()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def ask(server: Running, key: str, tokens: int) -> httpx.Response:
    body = {**LONG, "max_tokens": tokens}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=bearer(key), timeout=IDLE_S, trust_env=False)


def total(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_a_key_sees_its_own_requests_and_an_operator_all(server: Running, keys: dict[str, str]) -> None:
    body = {**LONG, "max_tokens": 8000, "stream": True}
    url = f"{server.url}/v1/chat/completions"
    with (
        ExitStack() as stack,
        httpx.Client(headers=bearer(keys["anna"]), timeout=IDLE_S, trust_env=False) as client,
        client.stream("POST", url, json=body) as answer,
    ):
        lines = answer.iter_lines()  # the stream closes with it
        next(line for line in lines if '"content":"' in line)
        stack.enter_context(paused(server))
        (mine,) = get(server, "/page/live", keys["anna"])["requests"]
        assert mine["client"] == "anna"
        assert mine["endpoint"] == "/v1/chat/completions"
        assert mine["prompt_tokens"] == mine["read_tokens"] > 0
        assert 0 < mine["output_tokens"] <= mine["max_tokens"] == 8000
        assert mine["state"] == "writing"
        assert get(server, "/page/live", keys["bert"])["requests"] == []
        (seen,) = get(server, "/page/live", keys["olga"])["requests"]
        assert seen["id"] == mine["id"]
    assert until(lambda: not server.app.admission.in_flight, IDLE_S)
    assert get(server, "/page/live", keys["olga"])["requests"] == []


def test_requests_that_fail_or_are_refused_do_not_stay(server: Running, keys: dict[str, str]) -> None:
    bad = {"messages": [{"role": "nobody", "content": ""}]}
    url = f"{server.url}/v1/chat/completions"
    assert (
        httpx.post(url, json=bad, headers=bearer(keys["anna"]), trust_env=False, timeout=IDLE_S).status_code
        == 400
    )
    assert ask(server, keys["anna"], 4).status_code == 200
    assert until(lambda: not server.app.admission.in_flight, IDLE_S)


def test_figures_are_those_of_metrics(server: Running, keys: dict[str, str]) -> None:
    ask(server, keys["anna"], 24)
    assert until(lambda: not server.app.admission.in_flight, IDLE_S)
    figures = get(server, "/page/live", keys["anna"])["figures"]
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=IDLE_S).text
    assert figures["generation_tokens"] == total(text, "vllm:generation_tokens_total")
    assert figures["plain_rounds"] == total(text, "paceline_plain_rounds_total")
    assert figures["rounds"] == total(text, "paceline_tokens_per_pass_count")
    drafted = sum(one["drafted"] for one in figures["acceptance"]["drafter"])
    assert drafted == total(text, "paceline_drafted_total") > 0
    assert sum(one["accepted"] for one in figures["acceptance"]["position"]) == total(
        text, "paceline_accepted_total"
    )
    assert sum(count for _, count in figures["batch_size"]) == figures["passes"]
    measured = 'paceline_route_tokens_per_pass{figure="measured",route="default"}'
    (line,) = (line for line in text.splitlines() if line.startswith(measured))
    assert figures["routes"]["default"]["tokens_per_pass"] == float(line.split()[-1]) > 1


def test_the_last_hour_is_the_key_s_own(server: Running, keys: dict[str, str]) -> None:
    ask(server, keys["bert"], 8)
    assert until(lambda: get(server, "/page/hour", keys["bert"])["total"]["requests"] > 0, IDLE_S)
    bert = get(server, "/page/hour", keys["bert"])["total"]
    assert (bert["requests"], bert["output_tokens"]) == (1, 8)
    assert get(server, "/page/hour", keys["olga"])["total"]["requests"] > 1


def test_without_a_store_there_is_no_last_hour(toy_server: Running) -> None:
    assert get(toy_server, "/page/hour", "") == {
        "stored": False,
        "minutes": [],
        "routes": [],
        "total": None,
    }


def test_strangers_of_a_server_without_keys_see_no_requests(tmp_path: Path) -> None:
    with toy_running(tmp_path, allowed_hosts=("box.example",)) as proxied:
        asking = threading.Thread(target=ask, args=(proxied, "", 4))
        with paused(proxied):
            asking.start()
            assert until(lambda: bool(proxied.app.admission.in_flight), IDLE_S)
            seen = get(proxied, "/page/live", "")
        asking.join()
    assert seen["requests"] == []
    assert seen["figures"]["running"] >= 0


def test_a_quantile_is_prometheus_s() -> None:
    buckets = [(0.1, 2.0), (0.2, 6.0), (0.4, 10.0), (math.inf, 10.0)]
    assert histogram_quantile(0.5, buckets) == pytest.approx(0.175)
    assert histogram_quantile(1.0, buckets) == pytest.approx(0.4)
    assert histogram_quantile(0.9, [(0.1, 1.0), (math.inf, 10.0)]) == 0.1
    assert histogram_quantile(0.5, [(0.1, 0.0), (math.inf, 0.0)]) is None
    assert histogram_quantile(0.5, []) is None


def test_sums_are_over_all_labels() -> None:
    registry = CollectorRegistry()
    drafted = Counter("paceline_drafted", "", ["route", "drafter", "position"], registry=registry)
    accepted = Counter("paceline_accepted", "", ["route", "drafter", "position"], registry=registry)
    for route, drafter, position, n in [
        ("a", "suffix", "0", 3),
        ("b", "suffix", "1", 5),
        ("b", "ngram", "0", 2),
    ]:
        drafted.labels(route, drafter, position).inc(n)
        accepted.labels(route, drafter, position).inc(n - 1)
    batch = Histogram("paceline_batch_size", "", buckets=(1, 2), registry=registry)
    for size in (1, 1, 2, 9):
        batch.observe(size)
    figures = read_figures(registry.collect())
    assert figures["acceptance"]["drafter"] == [
        {"name": "suffix", "drafted": 8, "accepted": 6},
        {"name": "ngram", "drafted": 2, "accepted": 1},
    ]
    assert figures["acceptance"]["route"][1] == {"name": "b", "drafted": 7, "accepted": 5}
    assert figures["batch_size"] == [[1.0, 2.0], [2.0, 1.0], ["inf", 1.0]]
    assert figures["tokens_per_pass"] is None


def record(**about: Any) -> RequestRecord:
    return RequestRecord(id="r", model="m", **{"created": 120.0, **about})


def test_an_hour_is_summed_by_minute_and_route() -> None:
    found = by_minute(
        [
            record(
                route="a", output_tokens=11, passes=5, first_token_s=1.0, seconds=3.0, drafted=8, accepted=6
            ),
            record(created=185.0, route="b", output_tokens=1, passes=1, first_token_s=2.0, seconds=2.0),
            record(created=186.0, route="b", finish="refused"),
        ]
    )
    assert [minute["at"] for minute in found["minutes"]] == [120, 180]
    assert [(route["route"], route["requests"], route["refused"]) for route in found["routes"]] == [
        ("a", 1, 0),
        ("b", 1, 1),
    ]
    sums = found["total"]
    assert (sums["output_tokens"], sums["tokens_per_pass"], sums["acceptance"]) == (12, 2.0, 0.75)
    assert sums["token_s"] == {"p50": 0.2, "p95": 0.2}
    assert sums["first_token_s"]["p50"] == 1.5


def test_a_busy_hour_is_read_in_part(server: Running, keys: dict[str, str]) -> None:
    asked: list[dict[str, Any]] = []

    def listed(limit: int, **filters: Any) -> list[RequestRecord]:
        asked.append({"limit": limit, **filters})
        return [record(created=5000.0 - i / 10) for i in range(limit)]

    store: Any = SimpleNamespace(list=listed)
    found = server.app.live._read_hour(store, "anna")
    assert asked[0]["limit"] == MAX_RECORDS
    assert asked[0]["client"] == "anna"
    assert found["since"] == 5000.0 - (MAX_RECORDS - 1) / 10
