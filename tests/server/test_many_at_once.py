"""Requests that share passes, and clients that leave: nobody's text changes, nothing stays behind."""

import asyncio
from typing import Any

import httpx
import pytest

from support.metrics import samples
from support.servers import IDLE_S, Running, until

pytestmark = pytest.mark.model

LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
BRIEF = httpx.Timeout(IDLE_S, read=1.0)
WORDS = ["sun", "rain", "snow", "wind", "fog", "hail", "storm", "cloud"] * 2


def aborted(server: Running) -> float:
    """Requests that ended because their client left."""
    name, reason = "vllm:request_success_total", ("finished_reason", "abort")
    found = samples(server.app.log.metrics).items()
    return sum(count for (metric, labels), count in found if metric == name and reason in labels)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_sixteen_at_once_say_what_each_says_alone(server: Running, temperature: float) -> None:
    async def ask(client: Any, i: int) -> str:
        asked = [{"role": "user", "content": f"Write {i + 2} words about {WORDS[i]}."}]
        found = await client.chat.completions.create(
            model=server.model, messages=asked, temperature=temperature, seed=i, max_completion_tokens=6 + i
        )
        return str(found.choices[0].message.content)

    async def both() -> tuple[list[str], list[str]]:
        async with server.async_client() as client:
            alone = [await ask(client, i) for i in range(16)]
            return alone, await asyncio.gather(*(ask(client, i) for i in range(16)))

    alone, together = asyncio.run(both())
    assert together == alone
    assert len(set(alone)) > 8
    assert until(lambda: server.in_flight == 0, IDLE_S)


def test_streams_of_all_kinds_at_once(server: Running) -> None:
    """Chat, responses and plain completions in the same passes."""

    async def chat(client: Any) -> str:
        asked = [{"role": "user", "content": "Tell me of the sea."}]
        given = {"model": server.model, "temperature": 0, "max_completion_tokens": 30, "stream": True}
        stream = await client.chat.completions.create(messages=asked, **given)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def response(client: Any) -> str:
        given = {"model": server.model, "temperature": 0, "max_output_tokens": 30, "stream": True}
        stream = await client.responses.create(input="Tell me of the sea.", **given)
        return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

    async def all_three() -> list[str]:
        async with server.async_client() as client:
            return list(await asyncio.gather(chat(client), response(client), chat(client), response(client)))

    assert len(set(asyncio.run(all_three()))) == 1


def test_a_client_that_leaves_a_stream_frees_its_request(server: Running) -> None:
    stream = server.client().completions.create(
        model=server.model,
        prompt="Once",
        stream=True,
        max_tokens=4000,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert server.in_flight == 1
    stream.close()
    assert until(lambda: server.in_flight == 0, IDLE_S)


def test_a_client_that_leaves_a_response_frees_its_request(server: Running) -> None:
    stream = server.client().responses.create(
        model=server.model, input="Tell a very long story.", stream=True, temperature=0
    )
    next(iter(stream))
    stream.close()
    assert until(lambda: server.in_flight == 0, IDLE_S)


@pytest.mark.parametrize(("words", "stream"), [(10, False), (6000, False), (6000, True)])
def test_a_client_that_hears_nothing_and_leaves_frees_its_request(
    server: Running, words: int, stream: bool
) -> None:
    """While its answer is written, or its prompt read, which takes half a minute."""
    body = {"model": server.model, "prompt": "word " * words, "stream": stream, **LONG}
    before = aborted(server)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=BRIEF, trust_env=False)
    assert until(lambda: server.in_flight == 0, IDLE_S)
    assert until(lambda: aborted(server) == before + 1, IDLE_S)


def test_a_client_that_leaves_the_queue_frees_its_request(server: Running) -> None:
    crowd = server.client().completions.create(
        model=server.model, prompt="Once", stream=True, n=16, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    assert until(lambda: server.in_flight == 16, IDLE_S)
    body = {"model": server.model, "prompt": "Twice", "stream": True, **LONG}
    before = aborted(server)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=BRIEF, trust_env=False)
    assert until(lambda: server.in_flight == 16, IDLE_S)
    assert until(lambda: aborted(server) == before + 1, IDLE_S)
    crowd.close()
    assert until(lambda: server.in_flight == 0, IDLE_S)


def test_several_choices_are_all_freed(server: Running) -> None:
    stream = server.client().completions.create(
        model=server.model,
        prompt="Once",
        n=4,
        stream=True,
        max_tokens=4000,
        temperature=1,
        extra_body={"ignore_eos": True},
    )
    assert until(lambda: server.in_flight == 4 or next(iter(stream)) is None, IDLE_S)
    stream.close()
    assert until(lambda: server.in_flight == 0, IDLE_S)
