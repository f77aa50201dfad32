"""Takes the picture of docs/split.md, docs/images/edge.png: the page at /edge in the middle of an answer.

python docs/make_edge_screenshot.py, in a clone, on a machine with Chromium and smollm2-135m.
"""

import re
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import WebSocketRoute

from paceline import hub
from paceline.server.app import App
from paceline.split.cloud import mount
from paceline.split.edge_page import browser_model, mount_page
from paceline.split.wire import MAX_OPEN_BYTES, Commit

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import chromium, opened  # noqa: E402
from support.servers import MODEL, running, until  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "edge.png"

PROMPT = "Write this line five times: The rider in front takes the wind, the others follow in the lee."
COMMITS = 5  # that pass before the picture is taken


def extend(app: App) -> None:
    mount(app)
    mount_page(app, browser_model(hub.resolve(MODEL)))


def hold(route: WebSocketRoute) -> None:
    """Passes so many commits on, and no more: the draft that follows stays provisional."""
    upstream, passed = route.connect_to_server(), [0]

    def pass_on(message: str | bytes) -> None:
        commit = isinstance(message, bytes) and message[0] == Commit.code
        passed[0] += commit
        if not commit or passed[0] <= COMMITS:
            route.send(message)

    upstream.on_message(pass_on)


def main() -> None:
    with (
        running(MODEL, extend=extend, max_message=MAX_OPEN_BYTES) as server,
        chromium() as browser,
        opened(browser, color_scheme="light", device_scale_factor=2) as page,
    ):
        page.route_web_socket(re.compile("/v1/split$"), hold)
        page.goto(f"{server.url}/edge")
        page.wait_for_selector("body[data-ready]")
        page.fill("#prompt", PROMPT)
        page.select_option("#mode", "patient")
        page.click("#run")
        provisional = page.locator("#provisional")
        assert until(lambda: len(provisional.text_content() or "") > 8, seconds=60)
        page.wait_for_timeout(2000)
        assert provisional.text_content()
        image = Image.open(BytesIO(page.screenshot())).convert("RGB")
        image.quantize(256, dither=Image.Dither.NONE).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
