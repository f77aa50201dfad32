"""Headless Chromium for tests of pages. The fixtures are in conftest.py: `browser_page`, `page_server`.

A page that logs an error, breaks its Content-Security-Policy or asks another host fails its test.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM: Final = Path(os.environ.get("PACELINE_CHROMIUM", "/usr/bin/chromium"))
DESKTOP: Final = {"width": 1280, "height": 860}
PHONE: Final = {"width": 390, "height": 844}
FITS: Final = "width => innerWidth === width && document.documentElement.scrollWidth <= width"
MISSING: Final = r"""() => {
  const found = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) found.push(walker.currentNode.data);
  return found.filter((text) => /^(false|null)$|\bundefined\b|\bNaN\b|\bInfinity\b|\[object/.test(text));
}"""  # texts that a script writes where it has no value
WAIT_MS: Final = 180_000  # on a machine that has much else to do


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT_MS)
        try:
            yield browser
        finally:
            browser.close()


def why_no_browser() -> str | None:
    if CHROMIUM.exists():
        return None
    return f"no Chromium at {CHROMIUM}: install one, or set PACELINE_CHROMIUM"


@contextmanager
def opened(browser: Browser, expected_errors: tuple[str, ...] = (), **context: Any) -> Iterator[Page]:
    """A tab of its own. expected_errors: parts of console errors that the test is about."""
    problems: list[str] = []

    def note_error(message: ConsoleMessage) -> None:
        if message.type == "error" and not any(part in message.text for part in expected_errors):
            problems.append(message.text)

    def note_request(request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "http://localhost:", "blob:", "data:")):
            problems.append(f"a request to {request.url}")

    with browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **context}) as tab:
        page = tab.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", note_error)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", note_request)
        yield page
    assert not problems


def check_at_all_sizes(page: Page) -> None:
    """As on a desktop and as on a phone: it fits the width, no value is missing, and axe is content."""
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.wait_for_function(FITS, arg=size["width"])  # charts are drawn again for the new width
        assert page.evaluate(MISSING) == []
        assert axe_violations(page) == []
    page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]


def axe_violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now: rule and elements."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {[node['html'][:120] for node in each['nodes'][:4]]}" for each in found]
