"""200 streams at once through the gate: every chunk arrives, in its order, as the upstream sent it."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from support.upstreams import gate, upstream

if TYPE_CHECKING:
    from support.servers import Running

STREAMS = 200
DIRECT = 40  # of them, sent to the server itself too
pytestmark = pytest.mark.slow


def test_a_real_server_writes_the_same_through_the_gate(toy_server: "Running", tmp_path: Path) -> None:
    settings = {
        "upstreams": [{"name": "toy", "url": toy_server.url}],
        "routes": [{"name": "all", "upstreams": {"toy": 1}}],
    }

    async def text(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=toy_server.model,
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=8,
            temperature=2.0,
            presence_penalty=2.0,
            logit_bias={"198": -100},
            seed=number,
            stream=True,
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(parts)

    async def all_of(url: str, streams: int) -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            return await asyncio.gather(*(text(client, number) for number in range(streams)))

    with gate(tmp_path, settings) as running:
        through = asyncio.run(all_of(running.url, STREAMS))
    assert through[:DIRECT] == asyncio.run(all_of(toy_server.url, DIRECT))
    assert len(set(through)) > DIRECT // 2


def test_no_byte_of_long_streams_is_lost_or_changed(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "count"}], "stream": True}

    async def raw(client: httpx.AsyncClient, url: str) -> bytes:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200
        return answer.content

    async def all_of(url: str, streams: int) -> list[bytes]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=600, trust_env=False) as client:
            return await asyncio.gather(*(raw(client, url) for _ in range(streams)))

    with upstream("a") as counting:
        counting.behaviour = "count"
        settings = {
            "upstreams": [{"name": "a", "url": counting.url}],
            "routes": [{"name": "all", "upstreams": {"a": 1}}],
        }
        (expected,) = asyncio.run(all_of(counting.url, 1))
        with gate(tmp_path, settings) as running:
            assert set(asyncio.run(all_of(running.url, STREAMS))) == {expected}
    assert expected.count(b"data:") > 50
