"""Freed memory goes back to the system once large requests have ended."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import httpx
import pytest

from paceline.server import app as server_app
from paceline.server.heap import HeapTrimmer
from support.servers import IDLE_S, toy_running, until


def test_many_large_requests_have_one_trim_on_another_thread() -> None:
    threads: list[int] = []

    async def run() -> None:
        trimmer = HeapTrimmer(lambda: threads.append(threading.get_ident()), quiet_s=0.02)
        for _ in range(100):
            trimmer.request()
        await trimmed(threads, 1)
        await asyncio.sleep(0.05)
        assert len(threads) == 1
        trimmer.request()
        await trimmed(threads, 2)

    asyncio.run(run())
    assert threading.get_ident() not in threads


async def trimmed(threads: list[int], times: int) -> None:
    async with asyncio.timeout(IDLE_S):
        while len(threads) < times:
            await asyncio.sleep(0.001)


def test_requests_that_do_not_stop_cannot_put_it_off() -> None:
    threads: list[int] = []

    async def run() -> None:
        trimmer = HeapTrimmer(lambda: threads.append(threading.get_ident()), quiet_s=3600, max_delay_s=0.02)
        async with asyncio.timeout(IDLE_S):
            while not threads:
                trimmer.request()
                await asyncio.sleep(0.001)

    asyncio.run(run())


def test_the_server_trims_after_large_bodies_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    trimmer = partial(HeapTrimmer, lambda: trims.append(1), quiet_s=0.01)
    monkeypatch.setattr(server_app, "HeapTrimmer", trimmer)
    with toy_running(tmp_path) as server:
        url = f"{server.url}/v1/completions"
        small, large = ({"prompt": [1] * count, "max_tokens": "x"} for count in (10, 100_000))
        assert httpx.post(url, json=small, trust_env=False).status_code == 400
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        assert not trims
        assert httpx.post(url, json=large, timeout=60, trust_env=False).status_code == 400
        assert until(lambda: bool(trims), IDLE_S)
