"""Requests that do their worst: each is answered, and the streams of others go on meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from bench.serve.hostile import ATTACKS, Target
from paceline.constraints import compiler
from paceline.drafters import prediction
from paceline.server.openai.params import MAX_STOP_BYTES, MAX_STOPS
from support.servers import Running

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
QUICK = (
    "repetitions after a letter",
    "ranges of repetitions",
    "many states",
    "pattern in a schema",
    "pattern in a required tool",
    "hundred thousand stops",
    "long stop",
    "doubling rules",
)
SLOW = (
    "nested repetitions",
    "one choice of a megabyte",
    "long constant",
    "doubling terminals",
    "deep schema",
)


def chat(server: Running, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "messages": HELLO, "max_tokens": 16, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@contextmanager
def stream_beside(server: Running) -> Iterator[threading.Event]:
    """A stream without end; the event is set at each of its chunks."""
    chunk, leaving = threading.Event(), threading.Event()
    body = {"model": server.model, "messages": HELLO, "ignore_eos": True, "stream": True, "seed": 1}

    def read() -> None:
        url = f"{server.url}/v1/chat/completions"
        while not leaving.is_set():
            with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
                for _ in response.iter_lines():
                    chunk.set()
                    if leaving.is_set():
                        return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert chunk.wait(60)
        yield chunk
    finally:
        leaving.set()
        thread.join(60)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_an_attack_gets_its_answer(toy_server: Running, name: str) -> None:
    port = int(toy_server.url.rpartition(":")[2])
    with stream_beside(toy_server) as chunk:
        assert ATTACKS[name].run(Target(port, toy_server.model)) in ATTACKS[name].expected
        chunk.clear()
        assert chunk.wait(60)
    assert toy_server.app.engine.thread.alive


def test_streams_go_on_while_a_grammar_is_compiled(
    toy_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compilation waits for chunks of another stream: were it the engine's, none would come."""
    real, threads = compiler.compile_grammar, list[str]()
    with stream_beside(toy_server) as chunk:

        def waits(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            for _ in range(5):
                chunk.clear()
                assert chunk.wait(60), "no stream goes on"
            return real(*given)

        monkeypatch.setattr(compiler, "compile_grammar", waits)
        response = chat(toy_server, structured_outputs={"regex": "[a-c]{3}!"})
    assert text(response).endswith("!")
    assert threads
    assert not any(name.startswith("paceline-engine") for name in threads)


def test_requests_are_prepared_while_many_grammars_wait(
    toy_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, compiling, leave = compiler.compile_grammar, threading.Semaphore(0), threading.Event()

    def waits(*given: Any) -> Any:
        compiling.release()
        assert leave.wait(60)
        return real(*given)

    monkeypatch.setattr(compiler, "compile_grammar", waits)
    threads = [
        threading.Thread(target=chat, args=(toy_server,), kwargs={"structured_outputs": {"regex": f"x{i}+y"}})
        for i in range(10)
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert compiling.acquire(timeout=60)
        assert text(chat(toy_server))
    finally:
        leave.set()
        for thread in threads:
            thread.join(60)


def test_as_many_stop_strings_as_allowed_are_matched(toy_server: Running) -> None:
    whole = text(chat(toy_server))
    stop = whole[4:8]
    others = [f"\x00 {i}".ljust(MAX_STOP_BYTES // MAX_STOPS) for i in range(MAX_STOPS - 1)]
    response = chat(toy_server, stop=[*others, stop])
    assert text(response) == whole[: whole.index(stop)]
    assert response.json()["choices"][0]["finish_reason"] == "stop"


def test_a_prediction_is_indexed_once_outside_the_engine_and_cut_to_the_context(
    toy_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []

    class Counted(prediction.PredictionIndex):
        def __init__(self, tokens: Any) -> None:
            made.append((threading.current_thread().name, len(tokens)))
            super().__init__(tokens)

    monkeypatch.setattr("paceline.llm.PredictionIndex", Counted)
    long = {"type": "content", "content": "some words of it " * 100_000}
    response = chat(toy_server, prediction=long, n=4, seed=3, temperature=1.0)
    assert len(response.json()["choices"]) == 4
    ((thread, tokens),) = made
    assert not thread.startswith("paceline-engine")
    assert tokens == toy_server.app.engine.llm.target.max_context
