"""POST /v1/prefill and `prefill: true`: prompts in the cache before the request that continues them."""

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import EngineConfig
from paceline.web import api_keys
from support.servers import IDLE_S, NAME, Running, toy_running, until

_numbers = count()
WORDS = "one two three four five six seven eight nine ten " * 8
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}


def post(server: Running, path: str = "/v1/prefill", **body: Any) -> httpx.Response:
    sent = {"model": NAME, "user": "u", **body}
    return httpx.post(f"{server.url}{path}", json=sent, trust_env=False, timeout=60)


def chat(server: Running, **body: Any) -> dict[str, Any]:
    request = {"max_tokens": 4, "temperature": 0, **body}
    answer: dict[str, Any] = post(server, "/v1/chat/completions", **request).raise_for_status().json()
    return answer


def new_text() -> str:
    """One that no other test sends."""
    return f"Story {next(_numbers)}: {WORDS}"


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_next_turn_finds_what_was_read_while_the_tool_ran(toy_server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": "x"}'}}
    history = [
        {"role": "user", "content": new_text()},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    result = {"role": "tool", "tool_call_id": "c1", "content": "12"}
    read = post(toy_server, messages=history, tools=[TOOL]).raise_for_status().json()
    assert (read["object"], read["usage"]["completion_tokens"]) == ("prefill", 0)
    tokens = read["usage"]["prompt_tokens"]
    assert cached(read) < tokens
    again = post(toy_server, messages=history, tools=[TOOL]).json()
    assert cached(again) == tokens - 1  # the last token's row is computed anew
    turn = chat(toy_server, messages=[*history, result], tools=[TOOL])
    assert cached(turn) == tokens
    assert turn["usage"]["prompt_tokens"] > tokens


def test_what_was_read_changes_no_text(toy_server: Running) -> None:
    text = new_text()
    messages = [{"role": "user", "content": text}]
    cold = chat(toy_server, messages=messages, user="cold", max_tokens=12)
    post(toy_server, messages=messages, user="warm").raise_for_status()
    warm = chat(toy_server, messages=messages, user="warm", max_tokens=12)
    assert (cached(cold), cached(warm) > 0) == (0, True)
    assert warm["choices"] == cold["choices"]


def test_system_prompt_and_tools_are_read_for_any_user(toy_server: Running) -> None:
    system = {"role": "system", "content": new_text()}
    tokens = post(toy_server, messages=[system], tools=[TOOL]).json()["usage"]["prompt_tokens"]
    for text in ("Hello", "What now?"):
        turn = chat(toy_server, messages=[system, {"role": "user", "content": text}], tools=[TOOL])
        assert cached(turn) >= tokens


def test_a_complete_prompt_is_read_to_its_end(toy_server: Running) -> None:
    messages = [{"role": "user", "content": new_text()}]
    part = post(toy_server, messages=messages).json()["usage"]["prompt_tokens"]
    whole = post(toy_server, messages=messages, add_generation_prompt=True).json()["usage"]["prompt_tokens"]
    turn = chat(toy_server, messages=messages)
    assert part < whole == turn["usage"]["prompt_tokens"]
    assert cached(turn) == whole - 1


def test_the_chat_endpoint_reads_too(toy_server: Running) -> None:
    answer = toy_server.client().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": new_text()}],
        extra_body={"prefill": True, "metrics": True},
    )
    assert answer.choices == []
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens > 50) == (0, True)


def test_openais_client_reaches_the_endpoint(toy_server: Running) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": new_text()}]}
    read: Any = toy_server.client().post("/prefill", cast_to=dict[str, Any], body=body)
    assert read["usage"]["prompt_tokens"] == read["usage"]["total_tokens"] > 50


def test_prompts_of_text_and_of_tokens_are_read(toy_server: Running) -> None:
    first, second = [new_text(), new_text()], list(range(5, 105))
    read = post(toy_server, prompt=first).json()
    assert read["usage"]["prompt_tokens"] > 100
    turn = post(toy_server, "/v1/completions", prompt=first[1] + " more", max_tokens=1).json()
    assert cached(turn) > 50
    assert post(toy_server, prompt=second).json()["usage"]["prompt_tokens"] == 100
    assert cached(post(toy_server, "/v1/completions", prompt=second, max_tokens=1).json()) == 99


def test_tenants_do_not_share_it(toy_server: Running) -> None:
    messages = [{"role": "user", "content": new_text()}]
    post(toy_server, messages=messages, user="anna").raise_for_status()
    assert cached(chat(toy_server, messages=messages, user="bert")) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}], "prefill": False}, "prefill"),
        ({"messages": [{"role": "user", "content": "a"}], "stream": True}, "stream"),
        ({"messages": [{"role": "user", "content": "a"}], "unheard_of": 1}, "unheard_of"),
        ({"prompt": "word " * 9000}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "prefill": True}, "prefill"),
    ],
)
def test_a_mistake_is_named(toy_server: Running, body: dict[str, Any], param: str) -> None:
    answer = post(toy_server, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_who_leaves_ends_it(toy_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> list[Any]:
        time.sleep(0.001)
        return []

    async def leave() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=IDLE_S) as client:
            body = {"model": NAME, "prompt": [7, 8, 9]}
            asking = asyncio.ensure_future(client.post(f"{toy_server.url}/v1/prefill", json=body))
            while not toy_server.in_flight:
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.wait([asking])

    monkeypatch.setattr(toy_server.app.engine.llm.engine, "step", endless)
    asyncio.run(asyncio.wait_for(leave(), IDLE_S))
    assert until(lambda: toy_server.in_flight == 0, IDLE_S)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("prefill")
    keys = folder / "keys.json"
    api_keys.add(keys, "first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.web.config_file.CHECK_EVERY_S", 0)
        with toy_running(folder, EngineConfig("cpu", cache_mb=64), keys=str(keys)) as server:
            yield server, keys


def test_a_key_is_charged_for_the_prompt_alone(keyed: tuple[Running, Path]) -> None:
    server, keys = keyed
    key = api_keys.add(keys, "anna", {"tokens_per_minute": 250})
    headers = {"authorization": f"Bearer {key}"}

    def read(tokens: int, **more: Any) -> int:
        body = {"model": NAME, "prompt": [9] * tokens, **more}
        url = f"{server.url}/v1/prefill"
        return httpx.post(url, json=body, headers=headers, trust_env=False).status_code

    assert read(100, max_tokens=5000, n=16) == 200
    assert read(100) == 200
    assert read(100) == 429
    assert httpx.post(f"{server.url}/v1/prefill", json={"prompt": "a"}, trust_env=False).status_code == 401
