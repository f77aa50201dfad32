"""Writes the pictures of the page, docs/images/page-*.png: `make screenshots`, on a quiet machine.

Names of views as arguments: only theirs.

A real server answers: the figures in the pictures are its own. Needs smollm2-135m and Chromium.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from io import BytesIO
from itertools import count, product
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from playwright.sync_api import Page  # noqa: E402

from support.browser import DESKTOP, PHONE, chromium, opened  # noqa: E402
from support.servers import Running, running  # noqa: E402

IMAGES = ROOT / "docs" / "images"
TRAFFIC_S = 20  # of the live view, and before the advice
PAIRS = 96  # of the gate's report
ROUTES = """routes:
  - {name: agents, match: {prompt: tools}}
  - {name: forms, match: {prompt: json}}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "An order by its id.",
        "parameters": {
            "type": "object",
            "properties": {"order_id": {"type": "string"}},
            "required": ["order_id"],
        },
    },
}
NAMES = ("Ada", "Alan", "Grace", "Edsger", "Barbara", "Donald", "Tony", "Leslie")
CLIENTS = 3


def question(client: int, number: int) -> dict[str, Any]:
    """The number-th request of a client: of the routes agents, default and forms."""
    order, name = 2047 + number, NAMES[number % len(NAMES)]
    texts = (
        f"What is in order B-{order}, which {name} wrote, and where is it now?",
        f"Write the numbers from {number + 1} to {number + 40}, in words.",
        f"A customer: {name}, order B-{order}, {number + 2} brass lanterns, London. As JSON.",
    )
    forms: tuple[dict[str, Any], ...] = ({"tools": [TOOL]}, {}, {"response_format": {"type": "json_object"}})
    return {"messages": [{"role": "user", "content": texts[client]}], **forms[client]}


def shoot(page: Page, name: str) -> None:
    """A picture of the window in 256 colours: a third of the bytes, and no difference to see."""
    image = Image.open(BytesIO(page.screenshot())).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"page-{name}.png", optimize=True)


def playground(page: Page, server: Running, folder: Path) -> None:
    page.goto(server.url)
    page.get_by_role("button", name="An order as JSON").click()
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Compare with plain").click()
    page.locator(".verdict").wait_for()
    page.get_by_label("Show rejected guesses").check()
    page.evaluate("window.scrollTo(0, 0)")
    page.locator(".written").first.locator(".t.s-suffix").last.hover()


@contextmanager
def traffic(server: Running) -> Iterator[None]:
    """Clients that ask one question after another."""
    stop = threading.Event()

    def ask(i: int) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            for number in count():
                if stop.is_set():
                    return
                body = {**question(i, number), "max_tokens": 192, "temperature": 0.4, "user": f"agent-{i}"}
                client.post(f"{server.url}/v1/chat/completions", json=body)

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(CLIENTS)]
    for one in clients:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in clients:
            one.join()


def live(page: Page, server: Running, folder: Path) -> None:
    page.goto(f"{server.url}/#/live")
    page.locator(".requests tbody tr").first.wait_for()
    page.wait_for_timeout(1000 * TRAFFIC_S)


def converse(server: Running, **body: Any) -> None:
    """An agent that looks up six orders: tool results come back as messages after a moment."""
    messages: list[Any] = [
        {"role": "system", "content": "You look up orders and repeat what you find, as JSON, word for word."},
        {"role": "user", "content": "Compare the orders B-2041 to B-2046."},
    ]
    with httpx.Client(timeout=120, trust_env=False) as client:
        for number in range(2041, 2047):
            found = {"order_id": f"B-{number}", "customer": "Ada Lovelace", "items": ["12 brass lanterns"]}
            messages.append({"role": "user", "content": f"The tool find_order returned {json.dumps(found)}"})
            asked = {"messages": messages, "max_tokens": 96, "temperature": 0, **body}
            answer = client.post(f"{server.url}/v1/chat/completions", json=asked).json()
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            time.sleep(0.3)


def runs(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/#/agent")
    page.get_by_role("link", name="with plain").first.wait_for()


def run(page: Page, server: Running, folder: Path) -> None:
    runs(page, server)
    page.locator(".runs tbody tr").first.get_by_role("link").first.click()
    page.locator(".turn-head").nth(2).click()
    page.locator(".round").first.wait_for()
    page.evaluate("window.scrollTo(0, 0)")


def compare(page: Page, server: Running, folder: Path) -> None:
    runs(page, server)
    page.get_by_role("link", name="with plain").first.click()
    page.locator(".pairs").wait_for()


def write_report(file: Path, *words: str) -> Path:
    """The report of a command of paceline. The gate's verdict is its exit code: only the file tells."""
    line = [sys.executable, "-m", "paceline", *words, "--json", file.name]
    subprocess.run(line, check=False, cwd=file.parent, stdout=subprocess.DEVNULL)
    if not file.exists():
        raise SystemExit(f"paceline {words[0]} wrote no report: its messages are above")
    return file


def gate_report(server: Running, folder: Path) -> Path:
    """Drafters against plain decoding, one server for both."""
    requests, report = folder / "requests.jsonl", folder / "gate.json"
    if report.exists():
        return report
    with requests.open("w") as file:
        for i in range(PAIRS):
            buyer = NAMES[i % len(NAMES)]
            text = f"Order {i}: {buyer} buys {i + 2} lanterns and {i % 7 + 1} kettles. Repeat it as JSON."
            file.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
    plain = {"speculative_config": {"disabled": True}, "cache_salt": "a", "remember": False}
    arms = ("--baseline-body", json.dumps(plain), "--candidate-body", json.dumps({"cache_salt": "b"}))
    where = ("--baseline", server.url, "--candidate", server.url, "--traces", requests.name)
    limits = ("--max-pairs", str(PAIRS), "--max-tokens", "64", "--texts", "--no-stop-early")
    return write_report(report, "gate", "run", *where, *arms, *limits)


def advice_report(server: Running, folder: Path) -> Path:
    """From the traces of the requests before it."""
    report = folder / "advice.json"
    if report.exists():
        return report
    with traffic(server):
        time.sleep(TRAFFIC_S)
    source = ("--target", "smollm2-135m", "--store", f"sqlite:///{folder}/traces.db")
    effort = ("--requests", "12", "--minutes", "5", "--max-tokens", "64")
    return write_report(report, "advise", *source, *effort)


def opened_report(page: Page, server: Running, view: str, report: Path) -> None:
    page.goto(f"{server.url}/#/{view}")
    page.locator("input[type=file]").set_input_files(report)
    page.locator(".chart").first.wait_for()


def gate(page: Page, server: Running, folder: Path) -> None:
    opened_report(page, server, "gate", gate_report(server, folder))


def evidence(page: Page, server: Running, folder: Path) -> None:
    """The charts and pairs of the gate's report."""
    gate(page, server, folder)
    page.evaluate("document.querySelector('.grid.wide').scrollIntoView()")
    page.evaluate("window.scrollBy(0, -document.querySelector('.top').offsetHeight - 8)")


def advice(page: Page, server: Running, folder: Path) -> None:
    opened_report(page, server, "advice", advice_report(server, folder))


# In this order: requests of later views are runs, too, and advice has the traces of all.
VIEWS: dict[str, Callable[[Page, Running, Path], None]] = {
    "run": run,
    "compare": compare,
    "playground": playground,
    "live": live,
    "gate": gate,
    "evidence": evidence,
    "advice": advice,
}


def main() -> None:
    """The views that are named, or all."""
    chosen = set(sys.argv[1:]) or set(VIEWS)
    if unknown := chosen - set(VIEWS):
        raise SystemExit(f"no view {', '.join(sorted(unknown))}; there are {', '.join(VIEWS)}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        routes = Path(folder) / "routes.yaml"
        routes.write_text(ROUTES)
        store = f"sqlite:///{folder}/traces.db"
        server = stack.enter_context(
            running("smollm2-135m", store=store, routes=str(routes), trace_text=True)
        )
        views = {name: show for name, show in VIEWS.items() if name in chosen}
        if {"run", "compare", "advice"} & chosen:
            for plain in (True, False):
                converse(server, speculative_config={"disabled": plain})
        browser = stack.enter_context(chromium())
        sizes = (("desktop", DESKTOP, 1.5), ("phone", PHONE, 2))
        for (name, show), scheme, (kind, size, scale) in product(views.items(), ("light", "dark"), sizes):
            look: dict[str, Any] = {"viewport": size, "device_scale_factor": scale, "color_scheme": scheme}
            busy = traffic(server) if name == "live" else nullcontext()
            with opened(browser, **look) as page, busy:
                show(page, server, Path(folder))
                shoot(page, f"{name}-{scheme}-{kind}")


if __name__ == "__main__":
    main()
