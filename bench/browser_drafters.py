"""python -m bench browser-drafters: the model drafters of the page at /edge, in headless Chromium.

wllama (WebAssembly) and onnxruntime-web (WebAssembly, WebGPU) with the same weights, one after the other:
what the browser downloads, the time until the model can draft, and that of a token which is read or drafted.
WebGPU is measured on request: without a GPU Chromium emulates one, which takes minutes and tells nothing.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright
from rich.console import Console

from bench import machine, results_folder
from bench.browser import CHROMIUM
from bench.split import server
from bench.table import Column, Table, number
from paceline import hub
from paceline.convert import export_onnx
from paceline.split.npm_packages import ONNXRUNTIME, WLLAMA
from paceline.text import Tokenizer

RESULT: Final = "browser_drafters"
WAIT_MS: Final = 300_000
READ, DRAFTED = 128, 16  # tokens
CONTEXT: Final = 1024
TEXT: Final = (
    "The rider in front takes the wind, the others follow in the lee; then they change places. " * 40
)
EMULATED_GPU: Final = (
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--use-vulkan=swiftshader",
)
DRAFTERS: Final = {
    "wllama": ("wllama, WebAssembly", WLLAMA, ()),
    "wasm": ("onnxruntime-web, WebAssembly", ONNXRUNTIME, ()),
    "webgpu": ("onnxruntime-web, WebGPU (emulated)", ONNXRUNTIME, EMULATED_GPU),
}
MEASURE: Final = """
async ({ name, tokens, count }) => {
  const beside = (file) => document.querySelector("script[type=module]").src.replace("main.js", file);
  const { Vocabulary } = await import(beside("vocabulary.js"));
  const vocabulary = new Vocabulary(await (await fetch("/v1/split/vocabulary")).arrayBuffer());
  const about = await (await fetch("/edge/about")).json();
  const { base, model: url } = about[name === "wllama" ? "wllama" : "onnxruntime"];
  const loaded = await import(beside(name === "wllama" ? "wllama_drafter.js" : "onnx_drafter.js"));
  const kind = loaded.WllamaDrafter ?? loaded.OnnxDrafter;
  const drafter = await kind.load({ base, url, vocabulary, backend: name });
  const timed = async (call) => {
    const begun = performance.now();
    return [await call(), performance.now() - begun];
  };
  const [first, readMs] = await timed(() => drafter.draft(tokens, [], 1));
  const [drafted, draftMs] = await timed(() => drafter.draft(tokens, first, count));
  const { startMs, megabytes, threads } = drafter;
  const times = { start_s: startMs / 1000, read_ms: readMs / tokens.length, draft_ms: draftMs / count };
  await drafter.close();
  return { ...times, model_mb: megabytes, threads, drafted };
}
"""


def measured(url: str, name: str, tokens: Sequence[int]) -> dict[str, Any]:
    """In a browser of its own."""
    label, package, flags = DRAFTERS[name]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *flags])
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{url}/edge")
        page.wait_for_selector("body[data-ready]")
        found: dict[str, Any] = page.evaluate(
            MEASURE, {"name": name, "tokens": list(tokens), "count": DRAFTED}
        )
        browser.close()
    package_mb = sum((package.folder / file).stat().st_size for file in package.files) / 1e6
    return {"drafter": label, "package_mb": package_mb, **found}


COLUMNS: Final = (
    Column("drafter", "drafter"),
    Column("threads", "threads"),
    Column("package", lambda row: f"{number(row['package_mb'], 1)} MB"),
    Column("model", lambda row: f"{number(row['model_mb'], 1)} MB"),
    Column("ready after", lambda row: f"{number(row['start_s'], 1)} s"),
    Column("a token read", lambda row: f"{number(row['read_ms'], 1)} ms"),
    Column("a token drafted", lambda row: f"{number(row['draft_ms'], 1)} ms"),
    Column("tokens/s", lambda row: number(1000 / row["draft_ms"], 1)),
    Column("as the first", lambda row: f"{row['agree']} of {DRAFTED}"),
)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench browser-drafters", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=["wllama", "wasm"])
    parser.add_argument("--port", type=int, default=8124)
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results")
    given = parser.parse_args(arguments)
    for _, package, _ in DRAFTERS.values():
        if not package.is_pulled:
            raise SystemExit(f"{package.name} is not here: paceline split pull")
    path = hub.resolve(given.model)
    tokens = Tokenizer.load(path).encode(TEXT)[:READ]
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        onnx = export_onnx(path, Path(folder) / "draft.onnx", dtype="gguf", context=CONTEXT)
        with server(given.model, given.port, 0, "--edge-onnx", str(onnx)) as port:
            for name in given.drafter:
                row = measured(f"http://127.0.0.1:{port}", name, tokens)
                first = rows[0]["drafted"] if rows else row["drafted"]
                agree = sum(a == b for a, b in zip(row["drafted"], first, strict=True))
                rows.append({**row, "agree": agree})
    Console().print(Table.of(COLUMNS, rows).terminal())
    if given.write:
        result = {"machine": machine.facts(), "model": given.model, "settings": vars(given), "rows": rows}
        results_folder.write(result, f"{RESULT}-{given.model}")
