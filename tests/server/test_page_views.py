"""Agent runs, gate and advice in headless Chromium, on a real server and on a gate."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from paceline.gate.pair import Pair
from paceline.gate.policy import Policy
from paceline.gate.report import json_report
from paceline.gate.store import GateStore
from paceline.gate.verdict import decide
from paceline.trace.store import Store
from support.advice import advised, an_advice
from support.browser import WAIT_MS, check_at_all_sizes, opened
from support.gate_pairs import pairs
from support.servers import IDLE_S, Running, toy_running, until
from support.traces import NOW, a_request, a_round
from support.upstreams import Gate, gate

expect.set_options(timeout=WAIT_MS)

HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
TURNS = 3


def differing(i: int, pair: Pair) -> Pair:
    candidate = replace(pair.candidate, draft_tokens=20, accepted_tokens=12, acceptance_histogram=(2, 3, 4))
    text = f"some {HOSTILE}" if i == 3 else "some words"
    return replace(pair, candidate=replace(candidate, text=text), cohort="ab"[i % 2])


PAIRS = pairs(60, 0.7, change=differing)


@pytest.fixture(scope="module")
def gate_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report as `paceline gate run --json --texts` writes it."""
    file = tmp_path_factory.mktemp("gate") / "report.json"
    file.write_text(json_report(decide(PAIRS, Policy()), {"candidate": HOSTILE}, PAIRS))
    return file


@pytest.fixture(scope="module")
def advice_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("advice") / "advice.json"
    off = advised("chats", decision="leave it off", reason=HOSTILE)
    file.write_text(json.dumps(an_advice(advised(), off).as_dict()))
    return file


@pytest.fixture(scope="module")
def conversed(page_server: Running) -> Running:
    """The same conversation, plain and with drafters."""
    for config in ({"disabled": True}, {"drafters": ["suffix", "ngram"]}):
        messages: Any = [{"role": "user", "content": f"Repeat this: {HOSTILE}"}]
        for turn in range(TURNS):
            answer = page_server.client().chat.completions.create(
                model=page_server.model,
                messages=messages,
                max_tokens=24,
                temperature=0,
                extra_body={"speculative_config": config},
                extra_headers={"x-conversation-id": "the same"},
            )
            said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
            messages = [*messages, said, {"role": "user", "content": f"Once more, for the {turn + 2}. time."}]
    assert until(lambda: _whole_runs(page_server) == 2, IDLE_S)  # they are written beside answers
    return page_server


def _whole_runs(server: Running) -> int:
    runs = httpx.get(f"{server.url}/page/runs", trust_env=False, timeout=IDLE_S).json()["runs"]
    return sum(run["turns"] == TURNS for run in runs)


def open_list(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/#/agent")
    page.get_by_role("link", name="with plain").first.wait_for()


def test_a_run_opens_with_its_turns_rounds_and_texts(browser_page: Page, conversed: Running) -> None:
    page = browser_page
    open_list(page, conversed)
    row = page.locator(".runs tbody tr").filter(has=page.get_by_text("suffix", exact=True)).first
    row.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"{TURNS} turns in")
    expect(page.locator(".turn")).to_have_count(TURNS)
    page.locator(".phase").nth(2).wait_for(state="attached")
    expect(page.locator(".tile", has_text="Prompt reused")).to_contain_text("%")
    head = page.get_by_role("button", expanded=False).filter(has_text="tokens").nth(1)
    head.focus()
    page.keyboard.press("Enter")
    detail = page.locator(".turn-detail:not([hidden])")
    detail.locator(".round").first.wait_for()
    expect(detail).to_contain_text("Once more, for the 2. time.")
    detail.locator("summary").click()
    expect(detail.locator("pre").first).to_have_text(f"Repeat this: {HOSTILE}")
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.broken") is None


def test_plain_and_speculative_are_side_by_side_on_one_clock(browser_page: Page, conversed: Running) -> None:
    page = browser_page
    open_list(page, conversed)
    page.get_by_role("link", name="with plain").first.click()
    expect(page.locator(".banner-title")).to_have_text(f"Identical text in all {TURNS} turns")
    clock = page.get_by_role("img", name=re.compile(r"^plain: .*; suffix, ngram: "))
    expect(clock.locator(".name")).to_have_count(2)
    expect(page.locator(".pairs tbody tr")).to_have_count(TURNS)
    expect(page.locator(".pairs tbody tr").first).to_contain_text("identical")
    expect(page.locator(".tile", has_text="Speed-up of answers")).to_contain_text("×")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Running]:
    """A store with a run of 200 turns."""
    folder = tmp_path_factory.mktemp("long")
    with closing(Store.open(str(folder / "traces.db"))) as store:
        for i in range(200):
            record = a_request(
                f"turn-{i}",
                created=NOW + 2 * i,
                conversation="long",
                prompt_tokens=100 + 20 * i,
                finish="tool_calls",
                predicted_calls={"right": i % 2, "wrong": 1},
            )
            store.save(record, [a_round(record.id, index) for index in range(40)])
    with toy_running(folder, store=str(folder / "traces.db")) as found:
        yield found


def test_two_hundred_turns_are_few_elements_and_laid_out_in_sight_only(
    browser_page: Page, long_run: Running
) -> None:
    page = browser_page
    page.goto(f"{long_run.url}/#/agent/turn-7")
    expect(page.get_by_role("heading", level=1)).to_contain_text("200 turns")
    assert page.locator(".phase").count() <= 7  # a path for each phase, not for each turn
    hidden = "turns => turns.filter((t) => !t.firstChild.checkVisibility({ contentVisibilityAuto: true }))"
    turns = page.locator(".turn")
    assert turns.count() == 200
    assert turns.evaluate_all(f"{hidden}.length") > 150


def test_a_trace_that_is_not_there_is_a_sentence(browser: Browser, long_run: Running) -> None:
    with opened(browser, expected_errors=("404",)) as page:
        page.goto(f"{long_run.url}/#/agent/{HOSTILE}")
        expect(page.get_by_role("alert")).to_contain_text("There is no trace")
        assert page.locator("main script, main img").count() == 0


def test_a_gate_report_opens_from_a_file(browser_page: Page, page_server: Running, gate_file: Path) -> None:
    page = browser_page
    page.goto(f"{page_server.url}/#/gate")
    page.get_by_text("paceline gate serve").wait_for()
    page.locator("input[type=file]").set_input_files(gate_file)
    expect(page.locator(".banner-title")).to_have_text("Hold")
    expect(page.locator(".banner")).to_contain_text("60 pairs")
    check = page.locator(".checks tbody tr").filter(has_text="tpot *").first
    expect(check).to_contain_text("proven")
    expect(check.get_by_role("img")).to_have_attribute("aria-label", re.compile("margin 1.050 ×"))
    assert page.locator(".dot").count() == 60
    expect(page.locator("figure, .panel").filter(has_text="Evidence: TPOT").first).to_contain_text("margin")
    pair = page.locator(".pair")
    expect(pair).to_contain_text("First difference at character 5")
    assert pair.locator("mark").all_inner_texts() == ["words", HOSTILE]
    page.get_by_label("Pair, and time of candidate over baseline").select_option("p59")
    expect(pair).to_contain_text("Identical text")
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.broken") is None


def test_a_file_of_another_kind_is_refused_with_a_sentence(
    browser_page: Page, page_server: Running, gate_file: Path, tmp_path: Path
) -> None:
    page, text, old = browser_page, tmp_path / "text.json", tmp_path / "old.json"
    text.write_text("no json")
    old.write_text(json.dumps({"routes": [{"best": {"turn_speedup": 1.4}, "candidates": []}], "memory": {}}))
    page.goto(f"{page_server.url}/#/advice")
    refused = (
        (gate_file, "is no report of advise"),
        (text, "is no JSON file"),
        (old, "is a report of another version: make it anew"),
    )
    for file, words in refused:
        page.locator("input[type=file]").set_input_files(file)
        expect(page.get_by_role("alert")).to_contain_text(f"{file.name} {words}")


def test_the_advice_view_copies_a_config(browser: Browser, page_server: Running, advice_file: Path) -> None:
    report = json.loads(advice_file.read_text())
    with opened(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.goto(f"{page_server.url}/#/advice")
        page.locator("input[type=file]").set_input_files(advice_file)
        for button, expected in (
            ("Copy this config", report["routes_file"]),
            ("Copy this route", report["routes"][0]["config"]),
        ):
            page.get_by_role("button", name=button).first.click()
            page.wait_for_function(
                "text => navigator.clipboard.readText().then((t) => t === text)", arg=expected
            )
            expect(page.locator("#status")).to_have_text("Copied")
        expect(page.locator(".panel", has_text="Memory").last).to_contain_text("98 MiB")
        expect(page.locator(".verdict-line").nth(1)).to_contain_text(HOSTILE)
        assert page.evaluate("window.broken") is None


def test_an_opened_file_stays_when_the_server_answers_later(
    browser_page: Page, page_server: Running, advice_file: Path
) -> None:
    page, asked = browser_page, list[Route]()
    page.route("**/page/advice", lambda route: asked.append(route))
    page.goto(f"{page_server.url}/#/advice")
    with page.expect_request("**/page/advice"):
        page.locator("input[type=file]").set_input_files(advice_file)
    page.get_by_role("button", name="Copy this config").wait_for()
    with page.expect_request_finished():
        asked[0].fulfill(json={"configured": False, "report": None})
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.locator(".empty").count() == 0


@pytest.fixture(scope="module")
def live_gate(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Gate]:
    """A gate with an experiment and an A/A control."""
    folder = tmp_path_factory.mktemp("live")
    mirror = {"candidate": "cand", "experiment": "new", "text": True}
    control = {"candidate": "base", "experiment": "control"}
    config = {
        "upstreams": [{"name": name, "url": "http://127.0.0.1:9"} for name in ("base", "cand")],
        "routes": [
            {"name": "control", "match": {"model": "c"}, "upstreams": {"base": 1}, "mirror": control},
            {"name": "all", "upstreams": {"base": 1}, "mirror": mirror, "promotion": {"automatic": False}},
        ],
    }
    with closing(GateStore.open(str(folder / "gate.db"))) as store:
        for name, made in (("new", PAIRS), ("control", pairs(40))):
            for pair in made:
                kept = replace(pair, id=f"{name}-{pair.id}", experiment=name, created=time.time())
                store.save_pair(kept)
    with gate(folder, config, store=str(folder / "gate.db")) as running:
        running.app.metrics.mirrored("all", "queue_full")
        yield running


def test_the_gate_s_own_page_follows_its_experiments(browser_page: Page, live_gate: Gate) -> None:
    page = browser_page
    page.goto(live_gate.url)
    expect(page.locator(".banner-title")).to_have_text("Hold")
    assert page.get_by_role("navigation", name="Views").get_by_role("link").all_inner_texts() == ["Gate"]
    expect(page.locator(".tile", has_text="Not recorded")).to_contain_text("queue full")
    expect(page.locator(".view-gate")).to_contain_text("control, the baseline against itself (A/A)")
    page.locator(".dot").nth(20).click()
    expect(page.locator(".pair")).to_contain_text("new-p20")
    page.get_by_role("link", name="control (A/A)").click()
    expect(page.locator(".banner")).to_contain_text("After 40 pairs")


def test_what_is_open_stays_open_when_pairs_are_added(browser_page: Page, live_gate: Gate) -> None:
    page, added = browser_page, 0

    def with_added(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "pairs": 60 + added})

    page.route("**/page/gate/new", with_added)
    page.clock.install()
    page.goto(live_gate.url)
    expect(page.locator(".banner")).to_contain_text("After 60 pairs")
    page.locator("summary", has_text="checks").click()
    page.locator(".dot").nth(20).click()
    expect(page.locator(".pair")).to_contain_text("new-p20")
    added = 1
    page.clock.fast_forward(60_000)  # to the next look
    expect(page.locator(".banner")).to_contain_text("After 61 pairs")
    expect(page.locator(".pair")).to_contain_text("new-p20")
    assert page.locator("details[open]").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_with_runs_gate_and_advice(
    browser: Browser, conversed: Running, live_gate: Gate, gate_file: Path, advice_file: Path, scheme: str
) -> None:
    with opened(browser, color_scheme=scheme) as page:
        open_list(page, conversed)
        check_at_all_sizes(page)
        page.get_by_role("link", name="with plain").first.click()
        page.locator(".pairs").wait_for()
        check_at_all_sizes(page)
        page.get_by_role("link", name="suffix, ngram").click()
        page.locator(".turn-head").first.click()
        page.locator(".round").first.wait_for()
        check_at_all_sizes(page)
        for view, file in (("gate", gate_file), ("advice", advice_file)):
            page.goto(f"{conversed.url}/#/{view}")
            page.locator(".empty").wait_for()
            check_at_all_sizes(page)
            page.locator("input[type=file]").set_input_files(file)
            page.locator(".chart").first.wait_for()
            page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true })")
            check_at_all_sizes(page)
        page.goto(live_gate.url)
        page.locator(".banner-title").wait_for()
        check_at_all_sizes(page)
