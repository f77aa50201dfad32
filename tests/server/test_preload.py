"""A server that is started again has what was used last ready before it is asked, unless it must not."""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from paceline import EngineConfig
from paceline.cli import main
from paceline.constraints.compiler import Compiler
from paceline.server import preload
from support.servers import IDLE_S, Running, toy_running, until

pytestmark = pytest.mark.slow

LONG = "You are a careful assistant with many rules. " * 12
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": {}}} for i in range(4)]
FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": [1, 2, 3]}}}


@pytest.fixture
def start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Starts a server on the folder kv; has it load what it will. All are ended with the test."""
    caplog.set_level(logging.INFO, "paceline")
    with ExitStack() as stack:
        count = 0

        def started(mb: int = 64, says: str | None = None, **settings: Any) -> Running:
            nonlocal count
            count += 1
            (tmp_path / str(count)).mkdir()
            caplog.clear()
            config = EngineConfig("cpu", cache_mb=64, cache_disk_mb=mb, cache_dir=str(tmp_path / "kv"))
            given = {"preload": True, **settings}
            server: Running = stack.enter_context(toy_running(tmp_path / str(count), config, **given))
            assert says is None or until(lambda: says in caplog.text, IDLE_S), caplog.text
            return server

        yield started


PAGES, GRAMMARS = "pages of the KV cache", "tools and response formats of the last requests are ready"


def ask(server: Running, text: str = LONG, **body: Any) -> tuple[str, int]:
    """The answer, and the prompt tokens that were cached."""
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0, **body}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{server.url}/v1/chat/completions", json=request).raise_for_status().json()
    engine: Any = server.app.engine
    if (disk := engine.llm.target._cache.disk) is not None:
        assert disk.flush(IDLE_S)
        disk.recent()  # written
        engine._compiled.__self__._file.flush()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return json.dumps(answer["choices"][0]["message"]), cached


def from_disk(server: Running) -> int:
    stats = server.app.engine.llm.target.cache_stats.disk
    assert stats is not None
    return stats.hit_tokens


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rules of the grammars that are compiled from now on."""
    rules: list[str] = []
    real = Compiler._compile

    def noted(self: Compiler, grammar: str) -> Any:
        rules.append(grammar)
        return real(self, grammar)

    monkeypatch.setattr(Compiler, "_compile", noted)
    return rules


@pytest.mark.parametrize("wait_s", [60.0, 0.0])
def test_the_prompt_used_last_is_in_memory(
    start: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setattr(preload, "WAIT_S", wait_s)
    text, _ = ask(start(), user="anna")
    server = start(says=PAGES)
    again, cached = ask(server, user="anna")
    assert again == text
    assert cached > 400
    assert from_disk(server) == 0
    assert ask(server, user="bert")[1] == 0
    without = start(preload=False)
    assert ask(without, user="anna") == (text, cached)
    assert from_disk(without) == cached
    assert PAGES not in caplog.text
    assert GRAMMARS not in caplog.text


def test_tools_and_formats_used_last_are_compiled_before_a_request_has_them(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    with_tools = ask(first, tools=TOOLS)[0]
    must_call = ask(first, tools=TOOLS, tool_choice="required")[0]
    formatted = ask(first, response_format=FORMAT)[0]
    rules = compiled(monkeypatch)
    server = start(says=GRAMMARS + ": 3,")
    assert rules
    rules.clear()
    assert ask(server, tools=TOOLS)[0] == with_tools
    assert ask(server, tools=TOOLS, tool_choice="required")[0] == must_call
    assert ask(server, response_format=FORMAT)[0] == formatted
    assert not rules
    assert ask(start(preload=False), tools=TOOLS)[0] == with_tools
    assert rules


@pytest.mark.parametrize(("wait_s", "ended"), [(60.0, 1), (0.0, 0)])
def test_a_server_waits_for_grammars_for_a_while(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, ended: int
) -> None:
    slow, prepared = threading.Event(), list[int]()

    def read() -> list[dict[str, Any]]:
        slow.wait(0.3 if wait_s else IDLE_S)
        prepared.append(1)
        return []

    monkeypatch.setattr(preload, "WAIT_S", wait_s)
    llm: Any = SimpleNamespace(target=SimpleNamespace(preload=lambda: None))
    outputs: Any = SimpleNamespace(read=read)
    nobody: Any = None
    preload.preload(llm, nobody, outputs)
    assert len(prepared) == ended
    slow.set()


def test_what_must_not_be_remembered_is_not_kept(start: Any, tmp_path: Path) -> None:
    ask(start(), tools=TOOLS, remember=False)
    ask(start(remember=False), tools=TOOLS)
    assert not list((tmp_path / "kv").rglob("recent*/*"))
    assert not list((tmp_path / "kv").rglob("recent"))


def test_without_a_disk_tier_nothing_is_kept_or_loaded(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask(start(), tools=TOOLS)
    ask(start(mb=0), tools=TOOLS)
    assert GRAMMARS not in caplog.text
    assert PAGES not in caplog.text


@pytest.mark.parametrize("content", [b"", b"damaged", None])
def test_a_file_that_is_damaged_is_ignored(start: Any, tmp_path: Path, content: bytes | None) -> None:
    text, _ = ask(start(), tools=TOOLS)
    files = [next((tmp_path / "kv").glob("*/recent")), next((tmp_path / "kv" / "recent_outputs").iterdir())]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"\xaa" if content is None else content)
    server = start()
    assert ask(server, tools=TOOLS)[0] == text


def test_the_command_that_clears_pages_clears_this_too(start: Any, tmp_path: Path) -> None:
    ask(start(), tools=TOOLS)
    files = {tmp_path / "kv" / "recent_outputs", *(tmp_path / "kv").glob("*/recent")}
    assert len(files) == 2
    assert all(path.exists() for path in files)
    with pytest.raises(SystemExit):
        main(["cache", "clear", "--cache-dir", str(tmp_path / "kv")])
    assert not any(path.is_file() for path in (tmp_path / "kv").rglob("recent*"))
    assert not any((tmp_path / "kv" / "recent_outputs").iterdir())
