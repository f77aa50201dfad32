"""The page in headless Chromium, on a real server: playground, comparison, live view, keys, accessibility."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect
from prometheus_client.parser import text_string_to_metric_families

from paceline.config import EngineConfig
from paceline.server.launch import ModelSettings
from paceline.web import api_keys
from support.browser import PHONE, WAIT_MS, axe_violations, check_at_all_sizes, opened
from support.servers import IDLE_S, NAME, Running, paused, toy_running

expect.set_options(timeout=WAIT_MS)

HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
CHAT = "**/v1/chat/completions"


def playground(page: Page, server: Running) -> None:
    page.goto(server.url)
    page.get_by_role("heading", name="See who wrote each token").wait_for()


def send(page: Page, text: str, tokens: int = 48) -> None:
    page.get_by_label("Max tokens", exact=True).fill(str(tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def order(page: Page, server: Running, tokens: int = 64) -> None:
    """An answer that fits a schema, to its end."""
    playground(page, server)
    page.get_by_role("button", name="An order as JSON").click()
    page.get_by_label("Max tokens", exact=True).fill(str(tokens))
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Compare with plain").wait_for()


def event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"


def round_of(start: int, texts: list[str], rejected: list[str] | None = None) -> dict[str, Any]:
    """A round whose last token is the target's own."""
    tokens = [{"id": i, "text": text, "source": "suffix", "probability": 0.5} for i, text in enumerate(texts)]
    tokens[-1] |= {"source": "target", "probability": None}
    return {
        "index": 0,
        "start": start,
        "tokens": tokens,
        "rejected": [
            {
                "position": start + len(texts) - 1,
                "id": 1,
                "text": text,
                "source": "ngram",
                "probability": None,
            }
            for text in rejected or []
        ],
        "drafted": len(texts) - 1 + len(rejected or []),
        "budget": 8,
        "batch": 1,
        "draft_us": 10,
        "target_us": 1000,
        "passes": start + 1,
        "tokens_per_pass": 2.0,
        "token_s": 0.001,
        "seconds": 0.1,
    }


def answer_with(page: Page, rounds: list[dict[str, Any]]) -> None:
    """From now on the server's answers have these rounds."""
    metrics = {"mean_itl_ms": 1.0, "time_to_first_token_ms": 1.0, "passes": len(rounds)}
    spec = {"num_draft_tokens": 1, "draft_acceptance_rate": 1.0}
    body = "".join(event({"choices": [], "round": r}) for r in rounds)
    end = {
        "choices": [],
        "usage": {"completion_tokens": 1},
        "metrics": {**metrics, "speculative_decoding": spec},
    }
    body += event(end) + "data: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_an_answer_is_coloured_by_drafter_and_a_token_tells_its_story(
    browser_page: Page, page_server: Running
) -> None:
    page = browser_page
    order(page, page_server)
    assert page.locator(".t.s-grammar").count() > 4
    assert page.locator(".t.s-target").count() > 0
    text = page.locator(".tokens").inner_text()
    assert text.startswith('{"order_id": "')
    page.locator(".t.s-grammar").first.hover()
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text("proposed by")
    expect(tip).to_contain_text("grammar")
    expect(tip).to_contain_text(re.compile(r"round\s*\d"))
    expect(page.locator(".figures").first).to_contain_text("tokens per pass")


def test_plain_decoding_beside_it_is_identical(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    order(page, page_server)
    page.get_by_role("button", name="Compare with plain").click()
    expect(page.locator(".verdict .badge")).to_have_text("identical")
    expect(page.locator(".verdict")).to_contain_text(re.compile(r"\d\.\d\d × as fast per token"))
    expect(page.locator(".verdict")).to_contain_text(re.compile(r"in \d+ passes instead of \d+"))
    texts = page.locator(".tokens").all_inner_texts()
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert page.locator(".both .written").nth(1).locator(".t:not(.s-target)").count() == 0


def test_of_several_models_the_one_chosen_answers(browser_page: Page, tmp_path: Path) -> None:
    page, engine = browser_page, EngineConfig("cpu", cache_mb=64)
    second = ModelSettings(str(tmp_path / f"{NAME}.gguf"), ("second",), engine=engine)
    with toy_running(tmp_path, engine, further_models=(second,), max_loaded=1) as server:
        playground(page, server)
        page.get_by_label("Model", exact=True).select_option("second")
        with page.expect_request(CHAT) as sent:
            send(page, "hello", 8)
        assert json.loads(sent.value.post_data or "")["model"] == "second"
        page.get_by_role("button", name="Compare with plain").click()
        expect(page.locator(".verdict .badge")).to_have_text("identical")
        states = {one.name: one.state for one in server.app.models.models}
        assert states == {NAME: "unloaded", "second": "loaded"}
        page.goto("about:blank")


def test_a_different_answer_is_called_different(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    playground(page, page_server)
    answer_with(page, [round_of(0, ["a", "b"])])
    send(page, "hello")
    page.get_by_role("button", name="Compare with plain").wait_for()
    other = round_of(0, ["a", "c"])
    other["tokens"][1]["id"] = 99
    answer_with(page, [other])
    page.get_by_role("button", name="Compare with plain").click()
    expect(page.locator(".verdict .badge")).to_have_text("different from token 1 on")
    assert page.locator(".t.differs").all_inner_texts() == ["b", "c"]


def test_a_tool_is_called_and_its_result_goes_back(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    playground(page, page_server)
    page.get_by_role("button", name="A tool call").click()
    page.get_by_role("button", name="Send").click()
    card = page.get_by_label("Call of get_weather")
    expect(card).to_contain_text('"city": "Oslo"')
    with page.expect_request(CHAT) as sent:
        card.get_by_label("Result of the tool").fill('{"temperature": 7}')
        card.get_by_role("button", name="Send the result").click()
    body: Any = sent.value.post_data_json
    messages = body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    expect(page.locator(".exchange.assistant")).to_have_count(2)
    page.get_by_role("button", name="Compare with plain").nth(1).wait_for()


def test_rejected_guesses_are_shown_on_demand(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    playground(page, page_server)
    answer_with(page, [round_of(0, ["a", "b"], ["x", "<i>"]), round_of(2, ["c"])])
    send(page, "hello")
    page.get_by_role("button", name="Compare with plain").wait_for()
    assert page.locator(".tokens del").count() == 0
    page.get_by_label("Show rejected guesses").check()
    assert page.locator(".tokens").inner_text() == "ax<i>bc"
    page.get_by_label("Show rejected guesses").uncheck()
    assert page.locator(".tokens").inner_text() == "abc"


def test_text_of_a_model_is_never_markup(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    playground(page, page_server)
    answer_with(page, [round_of(0, [HOSTILE, HOSTILE], [HOSTILE])])
    page.get_by_label("Show rejected guesses").check()
    send(page, HOSTILE)
    page.get_by_role("button", name="Compare with plain").wait_for()
    page.locator(".t").first.hover()
    page.get_by_role("tooltip").wait_for()
    assert page.locator(".tokens").inner_text() == HOSTILE * 3
    assert page.locator(".said").inner_text() == HOSTILE
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.broken") is None


def test_the_keyboard_reaches_everything(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    playground(page, page_server)
    answer_with(page, [round_of(0, ["one", "two"])])
    send(page, "hello")  # with Enter
    page.get_by_role("button", name="Compare with plain").wait_for()
    page.get_by_role("group", name=re.compile("Arrow keys")).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".t.current")).to_have_text("two")
    expect(page.get_by_role("tooltip")).to_contain_text("the model itself")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.goto(page_server.url)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"


def test_ten_thousand_tokens_are_drawn_in_few_steps_and_laid_out_in_sight_only(
    browser_page: Page, page_server: Running
) -> None:
    page = browser_page
    playground(page, page_server)
    answer_with(page, [round_of(4 * i, ["a", " b", " c", "\n"]) for i in range(2500)])
    page.evaluate(
        "window.draws = 0; new MutationObserver(() => { window.draws += 1 })"
        ".observe(document.querySelector('.conversation'), { childList: true, subtree: true })"
    )
    send(page, "hello")
    page.get_by_role("button", name="Compare with plain").wait_for()
    assert page.locator(".t").count() == 10_000
    assert page.evaluate("window.draws") < 500  # of 2,500 rounds
    blocks = page.locator(".tokens .block")
    assert blocks.count() > 40
    hidden = "blocks => blocks.filter((b) => !b.firstChild?.checkVisibility({ contentVisibilityAuto: true }))"
    assert len(blocks.evaluate_all(f"{hidden[:-1]}).map(() => 1)")) > blocks.count() // 2


def test_what_went_wrong_is_a_sentence(browser: Browser, page_server: Running) -> None:
    with opened(browser, expected_errors=("400", "ERR_FAILED")) as page:
        playground(page, page_server)
        page.get_by_label("JSON Schema of the answer").fill('{"type": ')
        send(page, "hello")
        expect(page.get_by_role("alert")).to_contain_text("The JSON Schema is not JSON")
        page.get_by_label("JSON Schema of the answer").fill('{"type": "nothing"}')
        send(page, "hello")
        expect(page.get_by_role("alert")).to_contain_text("response_format")
        page.get_by_label("JSON Schema of the answer").fill("")
        page.route(CHAT, lambda route: route.abort())
        send(page, "hello")
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        expect(page.get_by_label("Message", exact=True)).to_have_value("hello")  # to be sent again
        page.get_by_role("heading", name="See who wrote each token").wait_for()


def test_a_server_that_is_back_is_asked_again(browser: Browser, page_server: Running) -> None:
    with opened(browser, expected_errors=("ERR_FAILED",)) as page:
        page.route("**/page/about", lambda route: route.abort())
        page.goto(f"{page_server.url}/#/about")
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        assert axe_violations(page) == []
        page.unroute("**/page/about")
        page.get_by_role("button", name="Try again").click()
        page.get_by_role("heading", name="This server").wait_for()


def test_a_request_can_be_copied_as_a_command(browser: Browser, page_server: Running) -> None:
    with opened(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        playground(page, page_server)
        answer_with(page, [round_of(0, ["a", "b"])])
        with page.expect_request(CHAT) as sent:
            send(page, 'It\'s \\ "quoted"')
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.locator("#status")).to_have_text("Copied")
        words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[0] == "curl"
    assert f"{page_server.url}/v1/chat/completions" in words
    assert json.loads(words[words.index("-d") + 1]) == sent.value.post_data_json


def test_on_a_phone_the_tab_of_the_view_is_in_sight(browser: Browser, page_server: Running) -> None:
    with opened(browser, viewport={**PHONE, "width": 320}) as page:
        for view in ("about", "playground"):
            page.goto(f"{page_server.url}/#/{view}")
            tab = page.locator("#tabs [aria-current]")
            expect(tab).to_have_attribute("data-view", view)
            expect(tab).to_be_in_viewport(ratio=0.9)


def test_live_figures_move(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    body = {"messages": [{"role": "user", "content": "Count: 1 2 3"}], "max_tokens": 6000, "ignore_eos": True}
    url = f"{page_server.url}/v1/chat/completions"
    httpx.post(url, json={**body, "max_tokens": 2}, timeout=IDLE_S, trust_env=False)
    page.goto(f"{page_server.url}/#/live")
    tokens = page.locator(".tile", has_text="Throughput").locator(".note")
    before = int(re.sub(r"\D", "", tokens.inner_text()))
    with (
        ExitStack() as stack,
        httpx.stream("POST", url, json={**body, "stream": True}, timeout=IDLE_S, trust_env=False) as answer,
    ):
        lines = answer.iter_lines()  # the stream closes with it
        next(line for line in lines if '"content":"' in line)
        stack.enter_context(paused(page_server))
        row = page.locator(".requests tbody tr")
        expect(row).to_contain_text("writing, at most 6,000")
        expect(row).to_contain_text("chatcmpl-")
        assert axe_violations(page) == []
    expect(page.locator(".requests")).to_contain_text("Nothing is running.")
    expect(tokens).not_to_have_text(f"{before:,} in all")
    assert int(re.sub(r"\D", "", tokens.inner_text())) > before
    expect(page.locator(".view-live")).to_contain_text(re.compile(r"[1-9]\d* requests, "))


def test_live_figures_are_those_of_metrics(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    body = {"messages": [{"role": "user", "content": "Count: 1 2 1 2 1 2"}], "max_tokens": 16}
    url = f"{page_server.url}/v1/chat/completions"
    httpx.post(url, json=body, timeout=IDLE_S, trust_env=False).raise_for_status()
    page.goto(f"{page_server.url}/#/live")
    expect(page.locator(".requests")).to_contain_text("Nothing is running.")
    text = httpx.get(f"{page_server.url}/metrics", timeout=IDLE_S, trust_env=False).text
    sums = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value  # type: ignore[assignment]
    rounds, drafted = sums["paceline_tokens_per_pass_count"], sums["paceline_drafted_total"]
    shown = {
        "Throughput": f"{sums['vllm:generation_tokens_total']:,.0f} in all",
        "Tokens per pass": f"{sums['paceline_tokens_per_pass_sum'] / rounds:.2f}",
        "Accepted": f"of {drafted:,.0f} drafted",
        "Plain rounds": f"{100 * sums['paceline_plain_rounds_total'] / rounds:.0f} %",
    }
    for label, figure in shown.items():
        expect(page.locator(".tile", has=page.get_by_text(label, exact=True))).to_contain_text(figure)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    folder = tmp_path_factory.mktemp("locked")
    key = api_keys.add(folder / "keys.json", "anna")
    with toy_running(folder, keys=str(folder / "keys.json")) as found:
        yield found, key


def test_the_page_asks_for_a_key_and_forgets_it_with_the_tab(
    browser: Browser, locked: tuple[Running, str]
) -> None:
    server, key = locked
    with opened(browser, expected_errors=("401",)) as page:
        page.goto(server.url)
        page.get_by_label("Key", exact=True).fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("alert")).to_contain_text("API key is missing or unknown")
        page.get_by_role("button", name="Enter a key").click()
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="See who wrote each token").wait_for()
        page.reload()
        page.get_by_role("heading", name="See who wrote each token").wait_for()
        assert page.evaluate("localStorage.length") == 0
    with opened(browser, expected_errors=("401",)) as page:
        page.goto(server.url)
        page.get_by_role("dialog").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong(browser: Browser, page_server: Running, scheme: str) -> None:
    with opened(browser, color_scheme=scheme) as page:
        order(page, page_server, 16)
        page.get_by_label("Show rejected guesses").check()
        page.get_by_role("button", name="Compare with plain").click()
        page.locator(".verdict").wait_for()
        page.locator(".t").nth(3).hover()
        check_at_all_sizes(page)
        page.get_by_role("button", name="New chat").click()
        page.get_by_role("heading", name="See who wrote each token").wait_for()
        check_at_all_sizes(page)
        for view, shown in (("live", ".tile"), ("about", ".facts")):
            page.goto(f"{page_server.url}/#/{view}")
            page.locator(shown).first.wait_for()
            check_at_all_sizes(page)


def test_axe_finds_nothing_wrong_with_the_key_dialog(
    browser: Browser, locked: tuple[Running, str], tmp_path: Path
) -> None:
    with opened(browser, expected_errors=("401",)) as page:
        page.goto(locked[0].url)
        page.get_by_role("dialog").wait_for()
        assert axe_violations(page) == []


def test_the_theme_is_chosen_and_kept(browser_page: Page, page_server: Running) -> None:
    page = browser_page
    playground(page, page_server)
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = "getComputedStyle(document.documentElement).backgroundColor"
    colour = page.evaluate(dark)
    page.reload()
    page.get_by_role("button", name="Theme: dark").wait_for()
    assert page.evaluate(dark) == colour == "rgb(19, 20, 21)"
