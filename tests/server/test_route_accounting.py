"""Predicted against measured, by route: figures, metrics, the log line, and GET /v1/routes."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.advise.routes_file import routes_yaml
from paceline.server.routes import Predicted, PredictedLoad
from paceline.server.telemetry import route_accounting
from paceline.server.telemetry.route_accounting import (
    LOG_EVERY_S,
    MIN_PLAIN,
    WINDOW,
    RouteAccounting,
)
from paceline.target.cost import batch_ms
from paceline.types import Draft, Round
from support.advice import advised
from support.metrics import run, samples, some_metrics
from support.servers import Running, toy_running


def cost(rows: int, context: int) -> float:
    return 10.0 + rows


def a_round(
    drafted: int = 4, accepted: int = 2, batch: int = 1, slowness: float = 1.0, rows: int = 0
) -> Round:
    rows = rows or batch * (1 + drafted)
    return Round(
        request="r",
        start=100,
        drafters=("suffix",),
        draft=Draft((7,) * drafted, sources=("suffix",) * drafted),
        path=tuple(range(accepted)),
        tokens=(7,) * (accepted + 1),
        budget=8,
        batch=batch,
        rows=rows,
        draft_us=500,
        target_us=round(1000 * slowness * cost(rows, 100)),
        drafted=drafted,
    )


def predicted(tokens_per_pass: float, speedup: float, **given: Any) -> Predicted:
    return Predicted(tokens_per_pass=tokens_per_pass, speedup=speedup, **given)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_up_compares_with_plain_passes_for_the_same_tokens() -> None:
    accounting = RouteAccounting(cost)
    for _ in range(10):
        accounting.add("agents", a_round())
    figures = accounting.figures("agents")
    assert figures is not None
    assert figures.tokens_per_pass == 3
    assert figures.speedup == pytest.approx(3 * 11 / (15 + 0.5))
    assert figures.acceptance == 0.5
    assert accounting.figures("other") is None


def test_a_machine_that_is_slower_than_its_curve_gains_as_much() -> None:
    accounting = RouteAccounting(cost)
    accounting.add("a", a_round(slowness=3))
    figures = accounting.figures("a")
    assert figures is not None
    assert figures.speedup == pytest.approx(3 * 33 / (45 + 0.5))


def test_passes_without_a_draft_tell_what_plain_ones_take() -> None:
    """The curve has passes with drafts too cheap by half, plain ones as they are."""
    accounting = RouteAccounting(cost)
    for _ in range(MIN_PLAIN - 1):
        accounting.add("a", replace(a_round(0, 0), draft_us=0))
    few = accounting.figures("a")
    for _ in range(100):
        accounting.add("a", a_round(slowness=1.5))
    accounting.add("a", replace(a_round(0, 0), draft_us=0))
    figures = accounting.figures("a")
    assert few is not None
    assert figures is not None
    assert few.speedup == pytest.approx(1)
    plain = 11 * (MIN_PLAIN + 300)
    assert figures.speedup == pytest.approx(plain / (11 * MIN_PLAIN + 100 * (22.5 + 0.5)))


def test_each_output_in_a_pass_has_a_context_of_its_own() -> None:
    accounting = RouteAccounting(lambda rows, context: 10.0 + rows + context / 10)
    r = a_round(4, 2, batch=4)
    accounting.add("a", replace(r, target_us=1000 * (10 + 20 + 4 * 10), draft_us=0))
    figures = accounting.figures("a")
    assert figures is not None
    assert figures.speedup == pytest.approx(3 * (10 + 4 + 40) / (10 + 20 + 40))


@pytest.mark.parametrize("rows", [64, 100, 64 * 5])
def test_a_round_takes_no_more_work_in_a_large_batch(rows: int) -> None:
    """Every round of a pass is added, in the engine's thread."""
    asked: list[int] = []

    def counted(rows: int, context: int) -> float:
        asked.append(rows)
        return cost(rows, context)

    accounting = RouteAccounting(counted)
    accounting.add("a", a_round(batch=2, rows=3))
    few = len(asked)
    accounting.add("a", a_round(batch=64, rows=rows))
    assert len(asked) == 2 * few


@pytest.mark.parametrize("rows", [7, 11, 14, 30])
def test_rows_of_a_pass_are_spread_over_its_outputs(rows: int) -> None:
    """A pass like the round's, one output after the other."""

    def curved(rows: int, context: int) -> float:
        return 10 + rows * rows + rows * context / 50

    share, more = divmod(rows, 7)
    expected = batch_ms(curved, [(share + (i < more), 100, 1) for i in range(7)])
    assert RouteAccounting(curved)._pass_ms(rows, a_round(batch=7)) == pytest.approx(expected)


def test_no_more_is_gained_than_tokens_per_pass() -> None:
    accounting = RouteAccounting(
        lambda rows, context: 10.0 / rows
    )  # as a curve may be where nothing was measured
    accounting.add("a", a_round())
    figures = accounting.figures("a")
    assert figures is not None
    assert 2.5 < figures.speedup < 3


def test_plain_rounds_are_as_fast_as_plain_decoding() -> None:
    accounting = RouteAccounting(cost)
    accounting.add("a", replace(a_round(0, 0, batch=4), draft_us=0))
    figures = accounting.figures("a")
    assert figures is not None
    assert figures.speedup == pytest.approx(1)


def test_passes_with_a_prompt_in_them_do_not_count() -> None:
    accounting = RouteAccounting(cost)
    accounting.add("a", a_round(rows=300))
    assert accounting.figures("a") is None


def test_old_rounds_fade() -> None:
    accounting = RouteAccounting(cost)
    for _ in range(WINDOW // 3 + 10):
        accounting.add("a", a_round())
    for _ in range(3 * WINDOW):
        accounting.add("a", a_round(4, 0))
    figures = accounting.figures("a")
    assert figures is not None
    assert figures.tokens_per_pass < 1.3
    assert figures.tokens <= WINDOW


def test_each_state_has_its_reason() -> None:
    accounting = RouteAccounting(cost)
    assert accounting.state("a", speculates=True)[0] == "idle"
    accounting.add("a", a_round())
    state, reason = accounting.state("a", speculates=True)
    assert state == "drafting"
    assert reason == "4.0 tokens drafted a pass, 50 % of them accepted: 2.13 x plain"
    for _ in range(40):
        accounting.add("a", a_round(0, 0, batch=8))
    state, reason = accounting.state("a", speculates=True)
    assert state == "plain"
    assert "8 outputs in a pass" in reason
    assert accounting.state("a", speculates=False)[0] == "off"


def test_the_log_compares_now_and_then_and_warns_of_a_wrong_prediction(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    accounting = RouteAccounting(cost, clock)
    accounting.predict({"a": predicted(3.0, 2.1), "b": predicted(5.0, 4.0)})
    with caplog.at_level(logging.INFO, "paceline"):
        for _ in range(200):
            for route in "abc":
                accounting.add(route, a_round())
        assert not caplog.records
        clock.now = LOG_EVERY_S
        accounting.add("a", a_round())
        accounting.add("a", a_round())
    lines = {record.getMessage(): record.levelname for record in caplog.records}
    assert lines == {
        "route a: 3.00 tokens per pass (3.00 predicted), 2.13 x plain (2.10 predicted)": "INFO",
        "route b: 3.00 tokens per pass (5.00 predicted), 2.13 x plain (4.00 predicted): "
        "ask `paceline advise` again": "WARNING",
        "route c: 3.00 tokens per pass, 2.13 x plain": "INFO",
    }


def test_without_a_cost_curve_no_prediction_is_called_wrong(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    accounting = RouteAccounting(None, clock)
    accounting.predict({"a": predicted(3.0, 2.1)})
    for _ in range(400):
        accounting.add("a", a_round())
    clock.now = LOG_EVERY_S
    with caplog.at_level(logging.INFO, "paceline"):
        accounting.add("a", a_round())
    (line,) = caplog.records
    assert line.levelname == "INFO"
    assert "1.00 x plain (2.10 predicted)" in line.getMessage()


def test_metrics_have_both_figures_of_each_route() -> None:
    metrics = some_metrics()
    metrics.accounting.predict({"agents": predicted(2.5, 1.5)})
    rounds = run(metrics)
    found = {
        (name, *sorted(dict(labels).values())): value
        for (name, labels), value in samples(metrics).items()
        if name.startswith("paceline_route_")
    }
    assert found["paceline_route_speedup", "agents", "predicted"] == 1.5
    assert found["paceline_route_tokens_per_pass", "agents", "predicted"] == 2.5
    own: dict[str, list[Round]] = {}
    for r in rounds:
        if r.tokens and r.request in ("s1", "s3"):
            own.setdefault(r.request, []).append(r)
    decoding = [r for of_output in own.values() for r in of_output[1:]]
    rate = sum(len(r.tokens) for r in decoding) / len(decoding)
    assert found["paceline_route_tokens_per_pass", "agents", "measured"] == pytest.approx(rate)
    assert samples(metrics)["paceline_metrics_faults_total", frozenset()] == 0


def test_the_server_says_what_its_routes_do(toy_server: Running) -> None:
    client = httpx.Client(base_url=toy_server.url, trust_env=False, timeout=60)
    body = {"model": toy_server.model, "prompt": "ab ab ab ab", "max_tokens": 8, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200
    (route,) = client.get("/v1/routes").json()["data"]
    assert (route["name"], route["drafters"]) == ("default", ["grammar", "suffix", "ngram"])
    assert route["state"] in ("drafting", "plain")
    assert route["reason"]
    assert route["predicted"] is None
    assert route["measured"]["tokens_per_pass"] >= 1


def test_a_routes_file_of_advise_is_accounted_for_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the advice to GET /v1/routes, the metrics and the log, by requests of the openai client."""
    file = tmp_path / "routes.yaml"
    off = advised("chats", decision="leave it off", match={})
    file.write_text(routes_yaml([advised("agents", match={"prompt": "tools"}), off]))
    monkeypatch.setattr(route_accounting, "LOG_EVERY_S", 0.0)
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages: Any = [{"role": "user", "content": "ab ab ab"}]
    with caplog.at_level(logging.INFO, "paceline"), toy_running(tmp_path, routes=str(file)) as server:
        given: dict[str, Any] = {"model": server.model, "messages": messages, "max_tokens": 12}
        given["extra_body"] = {"ignore_eos": True}
        with server.client() as client:
            client.chat.completions.create(**given, tools=[tool], tool_choice="none")
            client.chat.completions.create(**given)
        http = httpx.Client(base_url=server.url, trust_env=False, timeout=60)
        routes = {route["name"]: route for route in http.get("/v1/routes").json()["data"]}
        metrics = http.get("/metrics").text
    agents, chats = routes["agents"], routes["chats"]
    assert agents["predicted"] == {"tokens_per_pass": 2.4, "speedup": 1.9, "concurrency": 1}
    assert agents["measured"]["tokens_per_pass"] >= 1
    assert agents["measured"]["speedup"] > 0
    assert (chats["state"], chats["predicted"]) == ("off", None)
    for kind in ("predicted", "measured"):
        assert re.search(rf'paceline_route_speedup{{figure="{kind}",route="agents"}} [\d.]+', metrics)
    assert any("route agents: " in line and "(1.90 predicted)" in line for line in caplog.messages)


def test_the_prediction_for_the_nearest_load_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    accounting = RouteAccounting(cost, clock)
    alone = PredictedLoad(tokens_per_pass=3.0, speedup=3 * 11 / 15.5, concurrency=1)
    of_a = predicted(2.0, 1.1, concurrency=4, loads=(alone,))
    accounting.predict({"a": of_a, "b": predicted(2.0, 1.1, concurrency=16)})
    assert accounting.predictions()["a"].concurrency == 4  # planned, before there is any load
    for _ in range(300):
        accounting.add("a", a_round())
        accounting.add("b", a_round())
    assert accounting.prediction("a") == alone
    clock.now = LOG_EVERY_S
    with caplog.at_level(logging.INFO, "paceline"):
        accounting.add("a", a_round())
    line_a, line_b = caplog.records
    assert line_a.levelno == logging.INFO
    assert "at once" not in line_a.getMessage()
    assert line_b.levelno == logging.INFO
    assert "predicted for 16 at once, measured with 1.0" in line_b.getMessage()
