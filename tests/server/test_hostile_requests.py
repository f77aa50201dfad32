"""Requests that do their worst: each is answered, and the streams of others go on meanwhile."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from bench.serve.hostile import ATTACKS, Target
from paceline.constraints import compiler
from paceline.drafters import prediction
from paceline.server.openai import completions, params
from paceline.server.openai.params import MAX_STOP_BYTES, MAX_STOPS
from paceline.types import TokenLogprob
from paceline.web.api_errors import ApiError
from paceline.web.request_body import INLINE_BYTES
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
    "grammar without end",
    "alternatives in a tool",
    "many tools of which many are allowed",
)
SLOW = (
    "nested repetitions",
    "one choice of a megabyte",
    "long constant",
    "doubling terminals",
    "deep schema",
    "chain of references in a tool",
    "forty thousand messages",
    "twenty thousand system items",
    "large schema for many prompts",
)


def chat(server: Running, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "messages": HELLO, "max_tokens": 16, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@contextmanager
def stream_beside(server: Running) -> Iterator[threading.Event]:
    """A stream without end; the event is set at each of its chunks. Its passes leave the core to others."""
    chunk, leaving, engine = threading.Event(), threading.Event(), server.app.engine.llm.engine
    step = engine.step

    def unhurried() -> Any:
        time.sleep(0.01)
        return step()

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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "step", unhurried)
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


LARGE: list[Any] = [{"role": "user", "content": "x" * INLINE_BYTES}]


@pytest.mark.parametrize(
    ("function", "path", "body"),
    [
        ("serving.chat_params", "chat/completions", {"messages": LARGE}),
        ("completions.completion_params", "completions", {"prompt": LARGE[0]["content"]}),
        ("responses.as_chat", "responses", {"input": LARGE}),
        ("serving.chat_params", "responses", {"input": LARGE}),
    ],
)
def test_a_large_body_is_read_beside_the_event_loop(
    toy_server: Running, monkeypatch: pytest.MonkeyPatch, function: str, path: str, body: dict[str, Any]
) -> None:
    threads: list[str] = []

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        raise ApiError(400, "noted")

    monkeypatch.setattr(f"paceline.server.openai.{function}", noted)
    for sent in (body, {next(iter(body)): "x" if path != "chat/completions" else HELLO}):
        url = f"{toy_server.url}/v1/{path}"
        assert httpx.post(url, json=sent, timeout=60, trust_env=False).status_code == 400
    large, small = threads
    assert large.startswith("paceline-body")
    assert not small.startswith("paceline-body")


def test_large_prompts_are_encoded_one_after_another_and_small_ones_meanwhile(
    toy_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = toy_server.app.engine.llm
    real, encoding, leave = llm.encode, threading.Semaphore(0), threading.Event()

    def waits(prompt: Any, *given: Any, **more: Any) -> Any:
        if prompt != HELLO:
            encoding.release()
            assert leave.wait(60)
        return real(prompt, *given, **more)

    monkeypatch.setattr(llm, "encode", waits)
    threads = [
        threading.Thread(target=chat, args=(toy_server,), kwargs={"messages": LARGE}) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    try:
        assert encoding.acquire(timeout=60)
        assert text(chat(toy_server))
        assert not encoding.acquire(timeout=0.2)
    finally:
        leave.set()
        for thread in threads:
            thread.join(60)


def test_no_grammar_is_compiled_for_a_prompt_that_is_too_long(
    toy_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*given: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "compile_grammar", compiles)
    response = chat(toy_server, messages=LARGE, structured_outputs={"regex": "[d-f]{7}"})
    assert response.status_code == 400
    assert "shorten the prompt" in response.text


def test_prompts_of_one_request_share_its_parameters_and_its_prediction(
    toy_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*given: Any) -> Any:
            counts[name] += 1
            return real(*given)

        return call

    monkeypatch.setattr("paceline.llm.PredictionIndex", counted("index", prediction.PredictionIndex))
    read = counted("parameters", params.completion_params)
    monkeypatch.setattr(completions, "completion_params", read)
    body = {"prompt": ["a", "b", "c"], "max_tokens": 2, "prediction": {"content": "some words"}}
    url = f"{toy_server.url}/v1/completions"
    response = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert len(response.json()["choices"]) == 3
    assert counts == {"index": 1, "parameters": 1}


def test_the_offsets_of_log_probabilities_are_summed_once() -> None:
    lengths = 0

    class Text(str):
        def __len__(self) -> int:
            nonlocal lengths
            lengths += 1
            return super().__len__()

    class Piece(bytes):
        def decode(self, *given: Any) -> str:
            return Text(super().decode(*given))

    class Tokens:
        def piece(self, token: int) -> bytes:
            return Piece(b"ab" * token)

    logprobs = [TokenLogprob(i % 3, -1.0, ()) for i in range(300)]
    lists = completions._logprob_lists(Tokens(), logprobs, 5)  # type: ignore[arg-type]
    assert lists["text_offset"][:5] == [5, 5, 7, 11, 11]
    assert lengths <= 600
