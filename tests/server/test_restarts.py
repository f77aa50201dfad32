"""A server that is started again reads the prompts of the last one from the disk, and says so."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import EngineConfig
from paceline.cli import main
from paceline.errors import UsageError
from support.servers import IDLE_S, Running, toy_chat_model, toy_running, until

pytestmark = pytest.mark.slow

LONG = "You are a careful assistant with many rules. " * 12
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": {}}} for i in range(4)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts a server on the folder kv; all are ended with the test."""
    with ExitStack() as stack:
        count = 0

        def started(mb: int = 64, **settings: Any) -> Running:
            nonlocal count
            count += 1
            (tmp_path / str(count)).mkdir()
            config = EngineConfig("cpu", cache_mb=64, cache_disk_mb=mb, cache_dir=str(tmp_path / "kv"))
            return stack.enter_context(toy_running(tmp_path / str(count), config, **settings))

        yield started


def ask(server: Running, text: str = LONG, **body: Any) -> tuple[str, int]:
    """The answer, and the prompt tokens that were cached."""
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0, **body}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{server.url}/v1/chat/completions", json=request).raise_for_status().json()
    disk = server.app.engine.llm.target.cache_stats.disk
    if disk is not None:
        flush(server)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


def flush(server: Running) -> None:
    target: Any = server.app.engine.llm.target
    assert target._cache.disk.flush(IDLE_S)


def metric(server: Running, name: str) -> float:
    with httpx.Client(trust_env=False) as client:
        lines = client.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_prompt_is_read_once_by_all_servers_of_a_folder(start: Any) -> None:
    first = start()
    text, cached = ask(first, user="anna")
    assert cached == 0
    assert ask(first, user="anna")[0] == text
    for server in (start(), start()):
        again, cached = ask(server, user="anna")
        assert again == text
        assert cached > 400
        assert metric(server, 'paceline_prefix_cache_hits_total{tier="disk"}') == cached
        assert metric(server, 'paceline_prefix_cache_hits_total{tier="memory"}') == 0
        assert ask(server, user="anna")[0] == text
        assert metric(server, 'paceline_prefix_cache_hits_total{tier="memory"}') >= cached
        assert metric(server, "paceline_disk_cache_bytes") > 0
        assert metric(server, "paceline_disk_cache_limit_bytes") == 64 << 20


def test_without_it_nothing_is_written_and_the_text_is_the_same(start: Any, tmp_path: Path) -> None:
    off = start(mb=0)
    text, _ = ask(off)
    assert not (tmp_path / "kv").exists()
    assert ask(start())[0] == text
    assert ask(start())[0] == text
    assert "paceline_disk_cache" not in httpx.get(f"{off.url}/metrics", trust_env=False).text


def test_users_and_private_requests_leave_nothing_for_others(start: Any, tmp_path: Path) -> None:
    first = start()
    ask(first, user="anna")
    ask(first, "Private: " + LONG, user="anna", remember=False)
    pages = len(list((tmp_path / "kv").glob("*/*.page")))
    second = start()
    assert ask(second, user="bert")[1] == 0
    assert ask(second)[1] == 0
    assert ask(second, "Private: " + LONG, user="anna")[1] < 64  # of the template
    assert ask(second, user="anna")[1] > 400
    assert pages > 0


def test_for_strangers_only_whole_blocks_come_back(start: Any) -> None:
    first = start()
    ask(first)
    cached = ask(start())[1]
    assert cached > 0
    assert cached % 64 == 0


def test_the_prompt_of_a_route_is_read_before_anybody_sends_it(start: Any, tmp_path: Path) -> None:
    system = {"role": "system", "content": LONG}
    (tmp_path / "agent.json").write_text(json.dumps({"messages": [system], "tools": TOOLS}))
    (tmp_path / "routes.yaml").write_text("routes: [{name: agent, warm: agent.json}]")
    server = start(routes=str(tmp_path / "routes.yaml"))
    assert until(lambda: not server.in_flight, IDLE_S)
    question = [system, {"role": "user", "content": "What now?"}]
    cached = ask(server, messages=question, tools=TOOLS)[1]
    assert cached > 400
    flush(server)
    again = start(routes=str(tmp_path / "routes.yaml"))
    assert until(lambda: not again.in_flight, IDLE_S)
    disk = again.app.engine.llm.target.cache_stats.disk
    assert disk is not None
    assert disk.hit_tokens == cached // 64 * 64
    assert ask(again, messages=question, tools=TOOLS)[1] >= cached


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "no chat request: Invalid JSON"), ('{"tools": []}', "messages"), (None, "cannot read")],
)
def test_a_warm_prompt_that_cannot_be_used_shows_at_the_start(
    start: Any, tmp_path: Path, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "agent.json").write_text(content)
    (tmp_path / "routes.yaml").write_text("routes: [{name: agent, warm: agent.json}]")
    with pytest.raises(UsageError, match=reason):
        start(routes=str(tmp_path / "routes.yaml"))


def test_the_command_reads_prompts_for_later_servers(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system.txt").write_text(LONG + "\n")
    (tmp_path / "model").mkdir()
    model, folder = toy_chat_model(tmp_path / "model"), str(tmp_path / "kv")
    with pytest.raises(SystemExit) as ended:
        main(["cache", "warm", str(model), str(tmp_path / "system.txt"), "--cache-dir", folder])
    assert ended.value.code == 0
    assert "tokens, 0 of them were cached" in capsys.readouterr().out
    question = [{"role": "system", "content": LONG}, {"role": "user", "content": "What now?"}]
    assert ask(start(), messages=question)[1] > 300
    with pytest.raises(SystemExit) as ended:
        main(["cache", "warm", str(model)])
    assert ended.value.code == 2
