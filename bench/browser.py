"""python -m bench browser: the page of a running server in headless Chromium, on a quiet machine.

First contentful paint; frames while an answer streams at 200 tokens/s, and while 10,000 tokens are scrolled.
"""

import argparse
import os
from statistics import median, quantiles
from typing import Any, Final

from playwright.sync_api import Browser, sync_playwright

CHROMIUM: Final = os.environ.get("PACELINE_CHROMIUM", "/usr/bin/chromium")
LOADS: Final = 9
FRAME_MS: Final = 1000 / 60
STREAM_S: Final = 10
ANSWER: Final = """
async ({ rounds, everyMs, scrolls }) => {
  const base = document.querySelector("script[type=module]").src;
  const { Answer } = await import(new URL("answer.js", base));
  const answer = new Answer();
  document.querySelector("main").replaceChildren(answer.element);
  const token = (text, j) => ({ id: j, text, source: j < 3 ? "suffix" : "target", probability: null });
  const round = (i) => ({ index: 0, start: 4 * i, rejected: [], drafted: 3, batch: 1, draft_us: 9,
    target_us: 5000, passes: i, tokens_per_pass: 4, token_s: 0.005, seconds: i / 50,
    tokens: [" one", " two", " three", i % 12 ? "," : ".\\n"].map(token) });
  const gaps = [];
  let last = performance.now(), going = true;
  const frame = (now) => { gaps.push(now - last); last = now; if (going) requestAnimationFrame(frame); };
  if (everyMs) {
    requestAnimationFrame(frame);
    await new Promise((done) => {
      let i = 0;
      const timer = setInterval(() => {
        answer.add(round(i));
        window.scrollTo(0, document.documentElement.scrollHeight);
        i += 1;
        if (i === rounds) { clearInterval(timer); done(); }
      }, everyMs);
    });
  } else {
    for (let i = 0; i < rounds; i += 1) answer.add(round(i));
    answer.finish();
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    last = performance.now();
    requestAnimationFrame(frame);
    const height = document.documentElement.scrollHeight;
    for (let i = 0; i < scrolls; i += 1) {
      window.scrollTo(0, (height * i) / scrolls);
      await new Promise((done) => requestAnimationFrame(done));
    }
  }
  going = false;
  return { gaps: gaps.slice(2), tokens: answer.tokens.length };
}
"""


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


def frames(browser: Browser, url: str, **how: int) -> dict[str, Any]:
    with browser.new_context(viewport={"width": 1280, "height": 860}) as context:
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{url}/#/about", wait_until="networkidle")
        found: dict[str, Any] = page.evaluate(ANSWER, {"everyMs": 0, "scrolls": 0, **how})
        return found


def line(name: str, gaps: list[float]) -> str:
    late = sum(max(0, round(gap / FRAME_MS) - 1) for gap in gaps)
    p99 = quantiles(gaps, n=100)[98]
    return (
        f"{name}: {len(gaps)} frames, median {median(gaps):.1f} ms, p99 {p99:.1f} ms, "
        f"longest {max(gaps):.1f} ms, {late} dropped"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench browser", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of a running `paceline serve`")
    url = parser.parse_args(arguments).url
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        paints = first_paints(browser, url)
        print(
            f"first contentful paint: median {median(paints):.0f} ms, longest {max(paints):.0f} ms of {LOADS}"
        )
        streamed = frames(browser, url, rounds=50 * STREAM_S, everyMs=20)
        print(line(f"{streamed['tokens']:,} tokens streamed at 200/s", streamed["gaps"]))
        scrolled = frames(browser, url, rounds=2500, scrolls=240)
        print(line(f"{scrolled['tokens']:,} tokens scrolled", scrolled["gaps"]))
        browser.close()
