"""POST /v1/embeddings with the openai client: wire format, usage, limits, and what it does to others."""

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.server.telemetry.otel import Spans
from paceline.web import api_keys
from support.metrics import samples
from support.servers import NAME, Running, toy_running, until

TEXTS = ["The cat sat on the mat.", "Two and two are four."]


def post(server: Running, headers: Any = None, **body: Any) -> httpx.Response:
    url = f"{server.url}/v1/embeddings"
    return httpx.post(url, json={"model": NAME, **body}, headers=headers, trust_env=False, timeout=600)


def vectors(answer: httpx.Response) -> list[Any]:
    return [one["embedding"] for one in answer.raise_for_status().json()["data"]]


def test_the_openai_client_gets_a_vector_for_each_text(toy_server: Running) -> None:
    """The client asks for base64 and decodes it."""
    with toy_server.client() as client:
        found = client.embeddings.create(model=NAME, input=TEXTS)
        floats = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    assert (found.object, found.model) == ("list", NAME)
    assert [(one.object, one.index) for one in found.data] == [("embedding", 0), ("embedding", 1)]
    tokenizer = toy_server.app.engine.llm.tokenizer
    count = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (count, count)
    for one, other in zip(found.data, floats.data, strict=True):
        assert len(one.embedding) == toy_server.app.engine.llm.target.width
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
        assert other.embedding == pytest.approx(one.embedding, abs=1e-6)
    assert found.data[0].embedding != found.data[1].embedding


def test_a_text_and_its_tokens_alone_or_in_a_list_are_the_same(toy_server: Running) -> None:
    tokens = toy_server.app.engine.llm.tokenizer.encode(TEXTS[0])
    forms = (TEXTS[0], [TEXTS[0]], tokens, [tokens])
    first, *others = (vectors(post(toy_server, input=form)) for form in forms)
    assert all(other == first for other in others)


def test_base64_is_little_endian_float32(toy_server: Running) -> None:
    (written,) = vectors(post(toy_server, input=TEXTS[0], encoding_format="base64"))
    (floats,) = vectors(post(toy_server, input=TEXTS[0]))
    assert np.frombuffer(base64.b64decode(written), "<f4").tolist() == np.array(floats, "<f4").tolist()


def test_dimensions_shorten_a_vector_to_one_of_length_1(toy_server: Running) -> None:
    (whole,) = vectors(post(toy_server, input=TEXTS[0]))
    (short,) = vectors(post(toy_server, input=TEXTS[0], dimensions=8))
    assert len(short) == 8
    assert short == pytest.approx((np.array(whole[:8]) / np.linalg.norm(whole[:8])).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": "a", "dimensions": 100_000}, "dimensions", "expected at most 256"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ""}, "input", "at least one token"),
        ({"input": ["a"] * 2049}, "input", "at most 2,048 are taken"),
        ({"input": [1 << 30]}, "input", "tokens below"),
        ({"input": [list(range(100)) * 90]}, "input", "tokens"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "temperature": 0}, "temperature", "unknown key"),
        ({"input": "a", "model": "gpt-4"}, "model", "is not served here"),
        ({}, "input", "required"),
    ],
)
def test_what_is_wrong_is_said(body: dict[str, Any], param: str, message: str, toy_server: Running) -> None:
    answer = post(toy_server, **body)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_it_counts_in_metrics_traces_and_the_access_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline.access")
    with toy_running(tmp_path, store=f"sqlite:///{tmp_path}/traces.db") as server:
        used = post(server, input=TEXTS, user="anna").json()["usage"]["prompt_tokens"]
        found = samples(server.app.log.metrics)
        assert found["vllm:prompt_tokens_total", frozenset({("model_name", NAME)})] == used
        recorder: Any = server.app.log._recorder
        assert until(lambda: recorder.saved == 2, 60)
        records = recorder._store.list(10)
        assert {record.endpoint for record in records} == {"/v1/embeddings"}
        assert sum(record.prompt_tokens for record in records) == used
        assert all(TEXTS[0] not in repr(record.params) for record in records)
    assert any("POST /v1/embeddings 200" in line for line in caplog.messages)


def test_its_span_is_that_of_an_embedding(toy_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(toy_server.app.admission, "_spans", Spans(provider, keep_content=True))
    used = post(toy_server, input=TEXTS).json()["usage"]["prompt_tokens"]
    assert until(lambda: len(exporter.get_finished_spans()) == 1, 60)
    (span,) = exporter.get_finished_spans()
    attributes = dict(span.attributes or {})
    assert span.name == f"embeddings {NAME}"
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.usage.input_tokens"]) == (NAME, used)
    told = json.loads(str(attributes["gen_ai.input.messages"]))
    assert [message["parts"][0]["content"] for message in told] == TEXTS


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys.yaml"
    key = api_keys.add(keys, "anna", {"tokens_per_minute": 40})
    with toy_running(folder, keys=str(keys)) as server:
        yield server, key


def test_a_key_pays_for_the_tokens_it_has_read(keyed: tuple[Running, str]) -> None:
    server, key = keyed
    headers = {"authorization": f"Bearer {key}"}
    assert post(server, input="a").status_code == 401
    assert post(server, headers=headers, input=TEXTS[0]).status_code == 200
    refused = post(server, headers=headers, input=TEXTS[0] * 4)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_streams_write_the_same_beside_texts_that_are_read(toy_server: Running) -> None:
    def text() -> str:
        more = {"ignore_eos": True}
        with toy_server.client() as client:
            chunks = client.completions.create(
                model=NAME, prompt="one two", max_tokens=40, temperature=0, stream=True, extra_body=more
            )
            return "".join(chunk.choices[0].text for chunk in chunks)

    alone = text()
    with ThreadPoolExecutor(4) as clients:
        read = [clients.submit(post, toy_server, input=[f"{i} {TEXTS[0] * 20}"] * 3) for i in range(3)]
        assert clients.submit(text).result() == alone
        assert all(len(vectors(one.result())) == 3 for one in read)


def test_a_client_that_leaves_ends_its_texts(toy_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, engine = threading.Event(), toy_server.app.engine.llm.engine
    step = engine.step

    def held() -> Any:
        assert go_on.wait(600)
        return step()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=toy_server.url, trust_env=False, timeout=600) as client:
            body = {"model": NAME, "input": [f"{i} {TEXTS[0] * 60}" for i in range(64)]}
            request = asyncio.create_task(client.post("/v1/embeddings", json=body))
            assert await asyncio.to_thread(until, lambda: toy_server.in_flight >= 1, 600)
            request.cancel()

    monkeypatch.setattr(engine, "step", held)
    try:
        asyncio.run(leave())
        assert until(lambda: not toy_server.app.admission.in_flight, 600)
    finally:
        go_on.set()
    assert until(lambda: toy_server.in_flight == 0, 600)


def test_the_client_is_told_of_errors_as_of_openais(toy_server: Running) -> None:
    with toy_server.client() as client, pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=NAME, input="a", dimensions=100_000)
