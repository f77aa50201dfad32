"""The page of drafts in the browser: its files and headers, and Chromium against a real server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, WebSocketRoute

from paceline.convert import export_onnx
from paceline.server.app import App
from paceline.split.edge_page import CONTENT_SECURITY_POLICY, FOLDER, browser_model, mount_page
from paceline.split.npm_packages import ONNXRUNTIME, WLLAMA, NpmPackage
from paceline.split.wire import MAX_OPEN_BYTES, DraftMessage
from paceline.web import api_keys
from support.browser import CHROMIUM, WAIT_MS, opened
from support.servers import NAME, Running, running, toy_chat_model, toy_running
from support.split_server import mount_untimed

TOY: dict[str, Any] = {"max_message": MAX_OPEN_BYTES}
PROMPT = "one two three four one two three four one two"
DONE = "#answer[data-status=done]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    def extend(app: App) -> None:
        mount_untimed(app)
        mount_page(app)

    with toy_running(tmp_path_factory.mktemp("edge"), extend=extend, **TOY) as found:
        yield found


def fetch(server: Running, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, trust_env=False)


def plain(server: Running, prompt: str, max_tokens: int, **sampling: Any) -> tuple[str, int]:
    """Text and tokens without any draft."""
    given = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, **sampling}
    body = {**given, "model": server.model, "speculative_config": {"num_speculative_tokens": 0}}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=600).json()
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]


def test_the_page_is_isolated_and_closed_to_other_sites(server: Running) -> None:
    index = fetch(server, "/edge")
    paths = re.findall(r'(?:src|href)="(/edge/[^"]+)"', index.text)
    assert {path.rpartition("/")[2] for path in paths} == {
        "icon.svg",
        "page.css",
        "edge.css",
        "theme.js",
        "main.js",
    }
    modules = [f"{paths[0].rpartition('/')[0]}/{file.name}" for file in FOLDER.glob("*.js")]
    for path in ("/edge", *paths, *modules):
        response = fetch(server, path)
        assert response.status_code == 200, path
        assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert response.headers["cross-origin-embedder-policy"] == "require-corp"
        assert response.headers["x-content-type-options"] == "nosniff"
    assert "unsafe-inline" not in CONTENT_SECURITY_POLICY
    assert "'unsafe-eval'" not in CONTENT_SECURITY_POLICY
    again = fetch(server, "/edge", **{"if-none-match": index.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/edge/other/main.js",
        "/edge/packages/wllama-2.3.7/../../../wire.py",
        "/edge/packages/wllama-2.3.7/%2e%2e/%2e%2e/traces.db",
        "/edge/packages/wllama-1.0.0/index.js",
        "/edge/models/model.gguf",
        "/edge/models/model.onnx",
        "/edge/models/..%2f..%2fkeys.yaml",
    ],
)
def test_nothing_else_is_served(server: Running, path: str) -> None:
    assert fetch(server, path).status_code == 404


def test_the_page_says_why_there_is_no_model(server: Running, tmp_path: Path) -> None:
    about = fetch(server, "/edge/about").json()
    assert about == {"wllama": None, "onnxruntime": None, "reason": about["reason"]}
    assert "n-grams only" in about["reason"]
    assert browser_model(tmp_path) is None
    (tmp_path / "small.gguf").touch()
    assert browser_model(tmp_path / "small.gguf") == tmp_path / "small.gguf"


def test_the_model_needs_the_key_that_requests_need(tmp_path: Path) -> None:
    secret = api_keys.add(tmp_path / "keys.yaml", "ada")

    def extend(app: App) -> None:
        mount_untimed(app)
        mount_page(app, tmp_path / f"{NAME}.gguf")

    with toy_running(tmp_path, extend=extend, keys=str(tmp_path / "keys.yaml"), **TOY) as found:
        assert fetch(found, "/edge/models/model.gguf").status_code == 401
        model = fetch(found, "/edge/models/model.gguf", authorization=f"Bearer {secret}")
        assert model.content == (tmp_path / f"{NAME}.gguf").read_bytes()


def ask(page: Page, server: Running, prompt: str = PROMPT, max_tokens: int = 48, **fields: str) -> None:
    page.goto(f"{server.url}/edge")
    page.wait_for_selector("body[data-ready]", timeout=WAIT_MS)
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(max_tokens))
    for name, value in fields.items():
        field = page.locator(f"#{name}")
        if name in ("drafter", "mode"):
            field.select_option(value)
        else:
            field.fill(value)
    page.click("#run")


def answer(page: Page) -> tuple[str, dict[str, int]]:
    """The complete text and its figures."""
    page.wait_for_selector(DONE, timeout=WAIT_MS)
    found = page.locator("#answer")
    figures = {
        name: int(str(found.get_attribute(f"data-{name}"))) for name in ("tokens", "passes", "accepted")
    }
    assert page.locator("#provisional").text_content() == ""
    return str(page.locator("#committed").text_content()), figures


@pytest.mark.browser
@pytest.mark.parametrize("mode", ["opportunistic", "patient"])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_drafts_of_the_browser_are_verified_and_the_text_is_that_of_plain_decoding(
    server: Running, browser_page: Page, mode: str, temperature: str
) -> None:
    ask(browser_page, server, mode=mode, temperature=temperature, drafter="ngram", seed="5")
    text, figures = answer(browser_page)
    expected, tokens = plain(server, PROMPT, 48, temperature=float(temperature), seed=5)
    assert (text, figures["tokens"]) == (expected, tokens)
    if (temperature, mode) == ("0", "patient"):  # a tiny model repeats itself; drafts are waited for
        assert figures["accepted"] == tokens - figures["passes"]
        assert 2 * figures["passes"] <= tokens
    assert browser_page.locator("#connection").text_content() == "done"
    assert "ms" in str(browser_page.locator("#figures").text_content())


@pytest.mark.browser
def test_without_a_drafter_the_text_streams(server: Running, browser_page: Page) -> None:
    ask(browser_page, server, drafter="none")
    text, figures = answer(browser_page)
    assert (text, figures["tokens"]) == plain(server, PROMPT, 48, temperature=0, seed=7)
    assert figures["accepted"] == 0


@pytest.mark.browser
def test_a_connection_that_is_cut_again_and_again_loses_nothing(server: Running, browser: Browser) -> None:
    """Each of the first connections is cut after a few messages of the server."""
    cuts: list[int] = []

    def cut(route: WebSocketRoute) -> None:
        upstream = route.connect_to_server()
        if len(cuts) >= 4:
            return
        cuts.append(0)
        number = len(cuts) - 1

        def pass_on(message: str | bytes) -> None:
            cuts[number] += 1
            if cuts[number] > 4 + 3 * number:
                route.close()
                upstream.close()
            else:
                route.send(message)

        upstream.on_message(pass_on)

    with opened(browser, ("WebSocket",)) as page:
        page.route_web_socket(re.compile("/v1/split$"), cut)
        ask(page, server, max_tokens=96, drafter="ngram")
        text, figures = answer(page)
        assert "reconnection" in str(page.locator("#figures").text_content())
    assert (text, figures["tokens"]) == plain(server, PROMPT, 96, temperature=0, seed=7)
    assert len(cuts) >= 2


@pytest.mark.browser
def test_an_error_of_the_server_is_shown_as_a_sentence(server: Running, browser_page: Page) -> None:
    ask(browser_page, server, prompt="word " * 20_000)
    browser_page.wait_for_selector("#answer[data-status=failed]", timeout=WAIT_MS)
    assert "context" in str(browser_page.locator("#error").text_content())
    assert browser_page.locator("#run").is_enabled()


@pytest.mark.browser
def test_stopping_keeps_what_was_verified(server: Running, browser_page: Page) -> None:
    """The server waits for a draft that gets lost, so that the answer is not complete before the click."""
    answered: list[bytes] = []

    def lose_drafts(route: WebSocketRoute) -> None:
        upstream = route.connect_to_server()

        def pass_down(message: str | bytes) -> None:
            assert isinstance(message, bytes)
            answered.append(message)
            route.send(message)

        def pass_up(message: str | bytes) -> None:
            assert isinstance(message, bytes)
            if message[0] != DraftMessage.code or len(answered) < 8:
                upstream.send(message)

        upstream.on_message(pass_down)
        route.on_message(pass_up)

    browser_page.route_web_socket(re.compile("/v1/split$"), lose_drafts)
    ask(browser_page, server, max_tokens=400, mode="patient")
    browser_page.wait_for_selector("#committed:not(:empty)", state="attached")
    browser_page.click("#stop")
    text, figures = answer(browser_page)
    expected, tokens = plain(server, PROMPT, 400, temperature=0, seed=7)
    assert 0 < figures["tokens"] < tokens
    assert expected.startswith(text)


@pytest.mark.browser
def test_a_browser_is_asked_for_the_key(tmp_path: Path, browser: Browser) -> None:
    secret = api_keys.add(tmp_path / "keys.yaml", "ada")

    def extend(app: App) -> None:
        mount_untimed(app)
        mount_page(app)

    with (
        toy_running(tmp_path, extend=extend, keys=str(tmp_path / "keys.yaml"), **TOY) as found,
        opened(browser, ("401",)) as page,
    ):
        page.goto(f"{found.url}/edge")
        page.wait_for_selector("#key", timeout=WAIT_MS)
        page.fill("#key", secret)
        page.fill("#prompt", PROMPT)
        page.click("#run")
        _, figures = answer(page)
        assert figures["tokens"] > 0


SOFTWARE_GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--use-vulkan=swiftshader")


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Offers its own tiny model to browsers, in both forms."""
    folder = tmp_path_factory.mktemp("model")
    gguf = toy_chat_model(folder)
    onnx = export_onnx(gguf, folder / "toy.onnx", dtype="gguf", context=1024)

    def extend(app: App) -> None:
        mount_untimed(app)
        mount_page(app, gguf, onnx)

    with toy_running(folder, extend=extend, **TOY) as found:
        yield found


def require_package(package: NpmPackage) -> None:
    if not package.is_pulled:
        pytest.skip(
            f"{package.name} is not here: paceline split pull wllama, paceline split pull onnxruntime"
        )


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "package"), [("model", WLLAMA), ("wasm", ONNXRUNTIME)])
def test_a_model_in_the_browser_drafts(
    model_server: Running, browser_page: Page, drafter: str, package: NpmPackage
) -> None:
    """The same tiny model on both sides. Without a GPU, the best way to run it is wllama."""
    require_package(package)
    ask(browser_page, model_server, max_tokens=32, drafter=drafter, mode="patient")
    text, figures = answer(browser_page)
    assert (text, figures["tokens"]) == plain(model_server, PROMPT, 32, temperature=0, seed=7)
    assert browser_page.locator("#error").is_hidden()
    assert figures["accepted"] == figures["tokens"] - figures["passes"]
    assert 2 * figures["passes"] <= figures["tokens"]
    runs_by = "model.gguf" if package is WLLAMA else "model.onnx"
    loaded = "performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert any(name.endswith(runs_by) for name in browser_page.evaluate(loaded))
    assert "The model is here" in str(browser_page.locator("#drafter-note").text_content())


DRAFTS = """async (backend) => {
  const main = document.querySelector('script[type=module]').src;
  const { OnnxDrafter } = await import(main.replace("main.js", "onnx_drafter.js"));
  const { base, model } = (await (await fetch("/edge/about")).json()).onnxruntime;
  const drafter = await OnnxDrafter.load({ base, url: model, backend });
  const text = Array.from({ length: 20 }, (_, i) => (7 * i + 3) % 90);
  const drafts = [await drafter.draft(text, [], 6)];
  drafts.push(await drafter.draft(text, drafts[0].slice(0, 2), 4)); // goes on
  drafts.push(await drafter.draft([...text, 17], [], 4)); // rolls back
  drafts.push(await drafter.draft(text.slice(0, 9), [], 4));
  await drafter.close();
  return drafts;
}"""


@pytest.mark.browser
@pytest.mark.slow
def test_a_gpu_drafts_what_webassembly_drafts(model_server: Running, browser: Browser) -> None:
    """The GPU is emulated: this says nothing of its speed."""
    require_package(ONNXRUNTIME)
    other = browser.browser_type.launch(executable_path=CHROMIUM, args=["--no-sandbox", *SOFTWARE_GPU])
    with opened(other) as page:
        page.goto(f"{model_server.url}/edge")
        page.wait_for_selector("body[data-ready]", timeout=WAIT_MS)
        assert page.locator("#drafter option[value=webgpu]").is_enabled()
        on_gpu, in_wasm = (page.evaluate(DRAFTS, backend) for backend in ("webgpu", "wasm"))
    other.close()
    assert on_gpu == in_wasm
    assert on_gpu[1] == on_gpu[0][2:]
    assert len(on_gpu[2]) == len(on_gpu[3]) == 4


@pytest.mark.browser
@pytest.mark.model
@pytest.mark.slow
def test_a_model_in_the_browser_drafts_for_the_same_model_on_the_server(
    smollm2_path: Path, browser_page: Page
) -> None:
    require_package(WLLAMA)

    def extend(app: App) -> None:
        mount_untimed(app)
        mount_page(app, browser_model(smollm2_path))

    prompt = "List the days of the week."
    with running(str(smollm2_path), extend=extend, **TOY) as found:
        ask(browser_page, found, prompt, 32, drafter="wllama", mode="patient")
        text, figures = answer(browser_page)
        assert browser_page.evaluate("crossOriginIsolated")
        assert (text, figures["tokens"]) == plain(found, prompt, 32, temperature=0, seed=7)
    assert figures["accepted"] == figures["tokens"] - figures["passes"]
    assert (
        2 * figures["passes"] <= figures["tokens"]
    )  # of the first answer, whose prompt is read in WebAssembly
    assert "The model is here" in str(browser_page.locator("#drafter-note").text_content())
