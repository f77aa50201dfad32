"""Advice: verdicts with their reasons, conditions of routes, the files, the page."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.advise.advice import (
    MAX_TOOLS,
    Candidate,
    Interval,
    LengthPoint,
    LoadPoint,
    TrainingGain,
    conditions,
    length_by_batch,
    measured,
    verdict,
)
from paceline.advise.memory_estimate import MIB, MemoryEstimate
from paceline.advise.pass_times import PassTimes
from paceline.advise.report import Training, html
from paceline.advise.routes_file import routes_yaml
from paceline.advise.traffic import Spread, TracedRequest, Workload
from paceline.drafters import DRAFTERS
from paceline.server.routes import load
from support.advice import DEFAULT, WORKLOAD, advised, an_advice, around, candidate
from support.traces import a_round


def test_a_route_that_gains_is_advised_with_its_figures() -> None:
    decision, reason = verdict(candidate(), WORKLOAD, [LoadPoint(1, 1.9, 2.4)], 1, 300, 700, 9)
    assert decision == "speculate"
    assert reason == "2.40 tokens per pass: decoding 1.90 x, whole turns 1.40 x"
    loads = [LoadPoint(1, 2.5, 3.0), LoadPoint(4, 1.9, 2.4)]
    assert verdict(candidate(), WORKLOAD, loads, 4, 300, 700, 9)[1] == f"{reason}, 4 at once"


@pytest.mark.parametrize(
    ("best", "figures", "loads", "planned", "reading", "reason"),
    [
        (candidate(1.05, 0.99), WORKLOAD, [], 1, 10, "unpredictable text: 1.05 tokens per pass"),
        (candidate(1.6, 1.0), WORKLOAD, [], 1, 10, "save as much time as they cost"),
        (candidate(1.0, 1.0), WORKLOAD, [LoadPoint(1, 1.01, 1.2)], 4, 10, "save as much time as they cost"),
        (
            candidate(1.1, 0.99),
            WORKLOAD,
            [LoadPoint(1, 1.9, 2.4), LoadPoint(16, 0.99, 1.1)],
            16,
            10,
            "saturated by load: 1.90 x .* 0.99 x for 16",
        ),
        (candidate(turns=1.01), WORKLOAD, [], 1, 9300, "prefill-bound: 93 % of a turn is reading"),
        (
            candidate(turns=1.01),
            replace(WORKLOAD, output_tokens=Spread(5, 9, 6.0)),
            [],
            1,
            9300,
            "short answers: 5 tokens in the median",
        ),
    ],
)
def test_a_route_that_gains_nothing_is_left_off_with_the_reason(
    best: Candidate, figures: Workload, loads: list[LoadPoint], planned: int, reading: float, reason: str
) -> None:
    decision, why = verdict(best, figures, loads, planned, reading, 700, 9)
    assert decision == "leave it off"
    assert re.search(reason, why)


@pytest.mark.parametrize(
    ("speedup", "conversations", "decision"),
    [
        (Interval(1.3, 1.2, 1.4), 9, "speculate"),
        (Interval(1.3, 1.2, 1.4), 4, "too little data"),
        (Interval(1.3, 0.95, 1.8), 9, "too little data"),
        (Interval(0.98, 0.8, 1.2), 9, "too little data"),
        (Interval(0.98, 0.96, 1.01), 9, "leave it off"),
        (Interval(1.05, 1.02, 1.08), 9, "speculate"),  # whichever it is, the difference is small
    ],
)
def test_a_sample_that_may_mean_both_decides_nothing(
    speedup: Interval, conversations: int, decision: str
) -> None:
    best = replace(candidate(), speedup=speedup)
    found, reason = verdict(best, WORKLOAD, [], 1, 300, 700, conversations)
    assert found == decision
    if decision == "too little data":
        expected = "4 of at least 5 conversations" if conversations == 4 else f"between {speedup.low:.2f} x"
        assert expected in reason
        assert ("less than the 3 % that count as a gain" in reason) == (conversations == 9)


def test_a_route_with_too_little_data_stays_as_it_is_in_the_routes_file(tmp_path: Path) -> None:
    file, open_ = tmp_path / "routes.yaml", advised(decision="too little data", reason="2 of 5")
    existing = {"routes": [{"name": "agents", "match": {"path": "/v1/*"}, "max_draft": 3}, {"name": "rest"}]}
    file.write_text(routes_yaml([open_, advised("new", decision="too little data")], existing))
    routes = load(file, DRAFTERS).routes
    assert [(route.name, route.max_draft) for route in routes] == [("agents", 3), ("rest", None)]
    assert "# agents is not set here: too little data, 2 of 5" in file.read_text()
    assert "too little data" in html(an_advice(open_))
    assert not an_advice(open_).flags


def request(body: Mapping[str, Any], endpoint: str = "/v1/chat/completions") -> TracedRequest:
    return TracedRequest("x", "r", "c", body, endpoint)


def tools(*names: str) -> dict[str, Any]:
    return {"tools": [{"function": {"name": name}} for name in names]}


def classify(body: Mapping[str, Any]) -> str:
    return "tools" if body.get("tools") else "chat"


def test_conditions_tell_routes_apart() -> None:
    chats, flights = [request({})], [request(tools("book", "now")), request(tools("cancel", "now"))]
    shop = [request(tools("pay", "now"))]
    assert conditions(chats, [], classify) == {}
    assert conditions(chats, flights, classify) == {"prompt": "chat"}
    assert conditions(flights, shop, classify) == {"tools": ["book", "cancel"]}
    assert conditions([request({}, "/v1/completions")], chats, classify) == {"path": "/v1/completions"}
    assert conditions(chats, chats, classify) == {}
    assert conditions([*chats * 9, *shop], flights, classify) == {"prompt": "chat"}  # all but one
    assert conditions([*chats * 8, *shop, *shop], flights, classify) == {}


def test_a_few_tools_stand_for_a_route_where_nearly_every_request_offers_one() -> None:
    shop, bare = [request(tools("pay"))], request({})
    kinds = [request(tools(f"tool {i:02}")) for i in range(2 * MAX_TOOLS)]
    names = [f"tool {i:02}" for i in range(MAX_TOOLS)]
    assert conditions(kinds[: MAX_TOOLS + 1], shop, classify) == {"tools": names}  # 16 of 17
    assert conditions(kinds, shop, classify) == {}
    assert conditions([*kinds[:1] * 9, bare], [*shop, bare], classify) == {"tools": ["tool 00"]}
    assert conditions([*kinds[:1] * 8, bare, bare], [*shop, bare], classify) == {}


def test_measured_figures_leave_out_the_first_token() -> None:
    rounds = [a_round("r", 0, committed=1, target_us=900_000), a_round("r", 1), a_round("r", 2, committed=1)]
    figures = measured([rounds], PassTimes(lambda rows, context: 20.0))
    assert figures is not None
    assert figures.tokens_per_pass == 2
    assert figures.speedup == pytest.approx(4 * 20 / (2 * 21.04))
    assert measured([[]], PassTimes(lambda rows, context: 20.0)) is None


def test_the_length_falls_as_the_batch_grows() -> None:
    points = [LengthPoint(k, 1 + k / 4, 1.0) for k in (0, 1, 2, 4, 8, 16)]
    ranges = length_by_batch(points, PassTimes(lambda rows, context: 10 + max(0, rows - 8)), 500)
    assert ranges[0][0] == 1
    assert ranges[-1][1:] == (64, 0)
    assert [first for first, *_ in ranges[1:]] == [last + 1 for _, last, _ in ranges[:-1]]
    lengths = [length for *_, length in ranges]
    assert lengths == sorted(lengths, reverse=True)


def test_the_routes_file_is_one_that_the_server_takes(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    off = advised("chats", decision="leave it off", reason="unpredictable text", match={})
    other = advised("rest", match={}, workload=replace(WORKLOAD, requests=3))
    file.write_text(routes_yaml([advised(), off, other]))
    routes = load(file, DRAFTERS).routes
    assert [route.name for route in routes] == ["agents", "chats"]
    assert (routes[0].drafters, routes[0].max_draft) == (DEFAULT, 8)
    assert not routes[1].enabled
    assert "# rest is left out" in file.read_text()


def test_the_routes_file_says_where_the_machine_was_busy() -> None:
    first = [an_advice(advised(), busy=busy).routes_file().splitlines()[1] for busy in (True, False)]
    assert ["provisional" in line for line in first] == [True, False]


def test_routes_that_exist_keep_their_conditions_and_limits(tmp_path: Path) -> None:
    existing = {
        "routes": [
            {"name": "agents", "match": {"path": "/v1/*"}, "max_tokens": 50, "max_draft": 2},
            {"name": "all", "priority": 3},
        ]
    }
    file = tmp_path / "routes.yaml"
    file.write_text(routes_yaml([advised(), advised("new", match={"tools": ["a"]})], existing))
    routes = load(file, DRAFTERS).routes
    assert [route.name for route in routes] == ["agents", "new", "all"]
    assert routes[0].match is not None
    assert routes[0].match.path == "/v1/*"
    assert (routes[0].max_tokens, routes[0].max_draft) == (50, 8)
    assert routes[2].priority == 3


def test_the_page_is_one_file_with_its_charts_and_nothing_from_outside() -> None:
    page = html(an_advice(advised(), advised("chats", decision="leave it off", reason="short <answers>")))
    assert page.count("<svg") == 2 + 2 * 2
    assert "prefers-color-scheme: dark" in page
    assert "short &lt;answers&gt;" in page
    assert "x &lt;y&gt;" in page
    for outside in ("src=", "@import", "url(", "<script", "<link"):
        assert outside not in page
    links = re.findall(r'href="([^"]*)"', page)
    assert links
    assert all(link.startswith("#") for link in links)
    assert "Speed-ups are provisional" in page
    assert "--speculative-config" in page


def test_the_page_says_where_nothing_is_to_be_set_and_where_the_sample_is_small() -> None:
    page = html(an_advice(advised("chats", decision="leave it off", outputs=1, replayed=1)))
    assert "suffix" not in page[: page.index("In brackets")]  # the table of settings
    assert "1 output of 1 conversation, " in page
    assert "Too few" in page
    assert "Too few" not in html(an_advice(advised(outputs=9, replayed=5)))


def test_the_page_tells_what_a_fit_reached() -> None:
    fit = Training("block", 3.0, 40, 12, 1.62, 1.41)
    gain = TrainingGain(9, 3, around(3.0), around(2.57), around(1.36))
    page = html(an_advice(advised(training=gain), training=fit))
    assert "1.62" in page
    assert "1.41" in page
    (told,) = re.findall(r"With the drafter that was fitted.*?</p>", page, re.DOTALL)
    assert "2.57 x" in told
    assert "1.36 x" in told
    assert "9 outputs of 3 conversations" in told
    assert "Too few" in told
    assert "With the drafter that was fitted" not in html(an_advice(advised(), training=fit))
    unmeasured = html(an_advice(advised(), training=replace(fit, measured_answers=0, tokens_per_pass=0.0)))
    assert "too little other traffic" in unmeasured
    assert "0.00 tokens per pass" not in unmeasured


def test_other_engines_get_a_fixed_length_that_follows_the_batch() -> None:
    advice = an_advice(advised(), advised("chats", decision="leave it off"))
    assert list(advice.flags) == ["agents"]
    words = advice.flags["agents"]["vllm"].words
    assert json.loads(words[1])["num_speculative_tokens"] == 4
    assert json.loads(words[3]) == {"paceline": {"max_batch": 8}}
    assert "left out: grammar" in html(advice)


def test_a_draft_model_is_named_where_it_drafts() -> None:
    head = replace(advised().best, drafters=("suffix", "block"))
    flags = an_advice(advised(best=head), draft_model="small").flags["agents"]
    assert "EXPORTED_BLOCK" in flags["vllm"].text
    assert not any("small" in given.text for given in flags.values())
    both = replace(advised().best, drafters=("suffix", "model"))
    flags = an_advice(advised(best=both), draft_model="small").flags["agents"]
    assert all("small" in given.text for given in flags.values())


def test_other_engines_ask_a_head_for_drafts_that_it_makes() -> None:
    head = replace(advised().best, drafters=("suffix", "block"))
    flags = an_advice(advised(best=head, by_batch=((1, 64, 9),)), head_lengths={"block": 8}).flags["agents"]
    assert '"num_speculative_tokens": 8' in flags["vllm"].text


def test_json_holds_every_figure() -> None:
    figures = json.loads(json.dumps(an_advice(advised()).as_dict()))
    assert figures["routes"][0]["best"]["tokens_per_pass"]["value"] == 2.4
    assert figures["memory"]["verdict"] == "the cache holds the planned load"
    assert figures["flags"]["agents"]["sglang"]
    assert any("left out: grammar" in note for note in figures["flag_notes"]["agents"]["sglang"])


def test_the_command_for_the_server_loads_the_drafters_that_routes_need() -> None:
    head = replace(advised().best, drafters=("suffix", "block", "model"))
    on, off = advised(best=head), advised(best=head, decision="leave it off")
    loaded: dict[str, Any] = {"heads": {"block": "mine", "eagle": "other"}, "draft_model": "small"}
    needs = "--trained mine --draft-model small "
    assert an_advice(on, **loaded).serve_command == f"paceline serve smollm2-135m {needs}--routes"
    assert an_advice(off, **loaded).serve_command == "paceline serve smollm2-135m --routes"
    assert needs in an_advice(on, **loaded).routes_file().splitlines()[0]
    assert "--single-user --routes" in an_advice(on, single_user=True, **loaded).serve_command


def test_json_holds_the_routes_file_and_the_entry_of_each_route() -> None:
    one, undecided = advised(), replace(advised(), route="few", decision="too little data")
    figures = json.loads(json.dumps(an_advice(one, undecided).as_dict()))
    command = "paceline serve smollm2-135m --routes FILE"
    assert figures["routes_file"] == routes_yaml([one, undecided], None, command, provisional=True)
    (entry,) = yaml.safe_load(figures["routes"][0]["config"])
    (listed,) = yaml.safe_load(figures["routes_file"])["routes"]
    assert entry == listed
    assert figures["routes"][1]["config"] is None


@pytest.mark.parametrize(
    ("needed", "free", "words"),
    [
        (500, 100, "holds the planned load"),
        (1500, 4000, "--cache-mb 1536: the planned load needs 476 MiB more than are set"),
        (1500, 100, "100 MiB are free: plan for fewer at once"),
    ],
)
def test_the_memory_estimate_says_what_to_set(needed: int, free: int, words: str) -> None:
    bill = MemoryEstimate({}, {}, 1024 * MIB, 1000, needed * MIB, 4, 2000, free * MIB)
    assert words in bill.verdict
