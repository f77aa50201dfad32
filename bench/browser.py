"""python -m bench browser: the page of a running server in headless Chromium, on a quiet machine.

First contentful paint; frames while an answer streams at 200 tokens/s, and while 10,000 tokens are scrolled.
The answers are made up in the browser and read by the page as a server's: the machine draws, and does nothing
else. Beside frames, which depend on what else runs there: the time that the page's own thread worked.
"""

import argparse
import os
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM: Final = os.environ.get("PACELINE_CHROMIUM", "/usr/bin/chromium")
WAIT_MS: Final = 180_000
LOADS: Final = 9
FRAME_MS: Final = 1000 / 60
STREAM_S: Final = 10
TOKENS: Final = 10_000
SCROLL_STEPS: Final = 240
SIZE: Final = {"width": 1280, "height": 860}

# Answers requests for chat completions: rounds of four tokens, every `everyMs` or, where that is 0, at once.
MADE_UP: Final = """
({ rounds, everyMs }) => {
  const send = window.fetch;
  const token = (text, j) => ({ id: j, text, source: j < 3 ? "suffix" : "target", probability: null });
  const round = (i) => ({ index: 0, start: 4 * i, rejected: [], drafted: 3, batch: 1, draft_us: 9,
    target_us: 5000, passes: i + 1, tokens_per_pass: 4, token_s: 0.005, seconds: i / 50,
    tokens: [" one", " two", " three", i % 12 ? "," : ".\\n"].map(token) });
  const speculative_decoding = { num_draft_tokens: 3 * rounds, draft_acceptance_rate: 1 };
  const metrics = { mean_itl_ms: 5, time_to_first_token_ms: 5, passes: rounds, speculative_decoding };
  const end = { choices: [], usage: { completion_tokens: 4 * rounds }, metrics };
  const bytes = (data) => new TextEncoder().encode(`data: ${data}\\n\\n`);
  const body = () => new ReadableStream({ start(out) {
    let i = 0;
    const step = () => {
      if (i < rounds) out.enqueue(bytes(JSON.stringify({ choices: [], round: round(i) })));
      i += 1;
      if (i <= rounds) return;
      clearInterval(timer);
      out.enqueue(bytes(JSON.stringify(end)));
      out.enqueue(bytes("[DONE]"));
      out.close();
    };
    let timer = 0;
    if (everyMs) timer = setInterval(step, everyMs);
    else while (i <= rounds) step();
  } });
  const chat = (path) => path.endsWith("/chat/completions");
  window.fetch = async (path, options) => (chat(path) ? new Response(body()) : send(path, options));
}
"""
COUNT_FRAMES: Final = """
() => {
  window.gaps = [];
  let last = performance.now();
  const frame = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}
"""
SCROLL: Final = """
async (steps) => {
  const height = document.documentElement.scrollHeight;
  for (let i = 0; i <= steps; i += 1) {
    window.scrollTo(0, (height * i) / steps);
    await new Promise((done) => requestAnimationFrame(done));
  }
}
"""


@dataclass(frozen=True)
class Drawn:
    """gaps: milliseconds between frames. work: of the page's thread, seconds in all and by kind."""

    gaps: list[float]
    work: dict[str, float]

    def line(self, name: str) -> str:
        late = sum(max(0, round(gap / FRAME_MS) - 1) for gap in self.gaps)
        spent = ", ".join(f"{kind} {1000 * s:.0f}" for kind, s in self.work.items())
        return (
            f"{name}: {len(self.gaps)} frames, median {median(self.gaps):.1f} ms, "
            f"p99 {quantiles(self.gaps, n=100)[98]:.1f} ms, longest {max(self.gaps):.1f} ms, {late} dropped; "
            f"work in ms: {spent}"
        )


def first_paints(browser: Browser, url: str) -> list[float]:
    """Milliseconds from the navigation, each in a browser context without a cache."""
    paints = []
    for _ in range(LOADS):
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(url, wait_until="networkidle")
            name = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(float(page.evaluate(name)))
    return paints


def ask(page: Page, url: str, rounds: int, every_ms: int) -> None:
    """Sends a message in the playground."""
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.evaluate(MADE_UP, {"rounds": rounds, "everyMs": every_ms})
    page.get_by_label("Message", exact=True).fill("Count.")
    page.get_by_label("Message", exact=True).press("Enter")


def answered(page: Page) -> None:
    page.get_by_role("button", name="Compare with plain").wait_for()


def streamed(browser: Browser, url: str) -> Drawn:
    with browser.new_context(viewport=SIZE) as context:  # type: ignore[arg-type]
        page = context.new_page()
        ask(page, url, 50 * STREAM_S, 20)
        page.locator(".t").first.wait_for()
        return measured(page, lambda: answered(page))


def scrolled(browser: Browser, url: str) -> Drawn:
    with browser.new_context(viewport=SIZE) as context:  # type: ignore[arg-type]
        page = context.new_page()
        ask(page, url, TOKENS // 4, 0)
        answered(page)
        return measured(page, lambda: page.evaluate(SCROLL, SCROLL_STEPS))


def measured(page: Page, act: Any) -> Drawn:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    before = work(session)
    page.evaluate(COUNT_FRAMES)
    act()
    gaps = page.evaluate("window.gaps.slice(2)")
    after = work(session)
    return Drawn(gaps, {kind: after[kind] - before[kind] for kind in after})


def work(session: Any) -> dict[str, float]:
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    names = {"all": "Task", "script": "Script", "style": "RecalcStyle", "layout": "Layout"}
    return {kind: found[f"{name}Duration"] for kind, name in names.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench browser", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of a running `paceline serve`")
    url = parser.parse_args(arguments).url
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT_MS)
        paints = first_paints(browser, url)
        print(
            f"first contentful paint: median {median(paints):.0f} ms, longest {max(paints):.0f} ms of {LOADS}"
        )
        print(streamed(browser, url).line(f"{200 * STREAM_S:,} tokens streamed at 200/s"))
        print(scrolled(browser, url).line(f"{TOKENS:,} tokens scrolled"))
        browser.close()
