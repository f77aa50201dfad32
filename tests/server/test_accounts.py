"""Metrics, charges and records of requests that are abandoned, refused or fail."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.config import EngineConfig
from paceline.server.telemetry.otel import Spans
from paceline.trace.store import Store
from paceline.types import Seq
from paceline.web import api_keys
from support.metrics import samples
from support.servers import IDLE_S, Running, running, until

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "speculative_config": {"disabled": True}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ROUTES = [
    {"name": "hasty", "match": {"header": {"x-route": "hasty"}}, "timeout_s": 1},
    {"name": "brief", "match": {"header": {"x-route": "brief"}}, "max_prompt_tokens": 1},
    {"name": "private", "match": {"header": {"x-route": "private"}}, "trace_text": False},
]


class Server(NamedTuple):
    running: Running
    store: str
    anna: str
    bert: str  # a request a minute

    def client(self, key: str = "", route: str = "", timeout: float = IDLE_S) -> httpx.Client:
        headers = {"authorization": f"Bearer {key or self.anna}", "x-route": route}
        limits = httpx.Timeout(IDLE_S, read=timeout)
        return httpx.Client(
            base_url=f"{self.running.url}/v1/", trust_env=False, timeout=limits, headers=headers
        )

    def post(self, path: str = "completions", key: str = "", route: str = "", **asked: Any) -> httpx.Response:
        with self.client(key, route) as client:
            return client.post(path, json={"model": MODEL, **asked})

    @contextmanager
    def streaming(self, **asked: Any) -> Iterator[str]:
        """The id of an answer that is being written."""
        body = {"model": MODEL, "prompt": "Once", "stream": True, **LONG, **asked}
        with self.client() as client, client.stream("POST", "completions", json=body) as r:
            assert r.status_code == 200
            lines = r.iter_lines()  # to be kept: without it the stream is closed
            next(lines)
            yield r.headers["x-request-id"]

    def kept(self, name: str) -> dict[str, Any]:
        assert until(lambda: name in self.records(), IDLE_S)
        return self.records()[name]

    def records(self) -> dict[str, dict[str, Any]]:
        with closing(Store.open(self.store)) as store:
            return {found["id"]: found for found in store.export()}

    def counts(self) -> dict[str, float]:
        """Every counter and the number of observations of every histogram, with its labels."""
        found = samples(self.running.app.log.metrics)
        return {
            " ".join([name, *sorted(f"{k}={v}" for k, v in labels if k != "model_name")]): value
            for (name, labels), value in found.items()
            if name.endswith(("_total", "_count"))
        }

    def settle(self) -> None:
        assert until(lambda: self.running.in_flight == 0, IDLE_S)


WORK = ("prompt_tokens", "prefix_cache", "request_", "e2e_request", "time_to_first_token")


def work(counts: dict[str, float]) -> dict[str, float]:
    """Without what changes while others are answered."""
    return {name: v for name, v in counts.items() if any(part in name for part in (*WORK, "refused"))}


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    moved = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in moved.items() if value}


@pytest.fixture(scope="module")
def served(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two run, two wait."""
    folder = tmp_path_factory.mktemp("accounts")
    (folder / "routes.yaml").write_text(json.dumps({"routes": ROUTES}))
    config = EngineConfig(cache_mb=256, max_batch=2, max_waiting=2)
    keys_file = folder / "keys.json"
    anna = api_keys.add(keys_file, "anna")
    bert = api_keys.add(keys_file, "bert", {"requests_per_minute": 1, "tokens_per_minute": 1000})
    settings = {"store": str(folder / "traces.db"), "routes": str(folder / "routes.yaml"), "trace_text": True}
    with running(MODEL, config, keys=str(keys_file), **settings) as found:
        yield Server(found, str(settings["store"]), anna, bert)


ABORTED = "vllm:request_success_total finished_reason=abort"


def test_a_client_that_leaves_a_stream_has_aborted(served: Server) -> None:
    before = served.counts()
    with served.streaming() as name:
        pass
    served.settle()
    record = served.kept(name)
    assert (record["finish"], record["error"]) == ("cancelled", None)
    assert until(lambda: changes(before, served.counts()).get(ABORTED) == 1, IDLE_S)


def test_a_client_that_waits_for_a_whole_answer_and_leaves_has_aborted(served: Server) -> None:
    before = served.counts()
    with served.client(timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post("completions", json={"model": MODEL, "prompt": "Once", **LONG})
    served.settle()
    assert until(lambda: changes(before, served.counts()).get(ABORTED) == 1, IDLE_S)


def test_a_trace_says_what_went_wrong(served: Server) -> None:
    known = set(served.records())
    assert served.post(route="hasty", prompt="Once", **LONG).status_code == 408
    assert until(lambda: len(served.records()) > len(known), IDLE_S)
    (record,) = (found for name, found in served.records().items() if name not in known)
    assert (record["finish"], record["error"]) == ("error", "timeout")
    assert record["output_tokens"] > 0


def test_a_trace_with_text_keeps_calls_as_the_model_wrote_them(served: Server) -> None:
    asked = [{"role": "user", "content": "Look."}]
    found = served.post(
        "chat/completions", messages=asked, tools=[TOOL], tool_choice="required", max_tokens=64, temperature=0
    ).json()
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    record = served.kept(found["id"])
    tokenizer = served.running.app.engine.llm.tokenizer
    assert '"look"' in record["output"]
    assert record["output"].strip() in tokenizer.decode(record["output_ids"])


LONGEST = "word " * 9000
BAD = {"structured_outputs": {"regex": "("}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"prompt": LONGEST}, "too_long"),
        ({"prompt": "x", "temperature": -1}, "invalid"),
        ({"prompt": "x", **BAD}, "invalid"),
        ({"prompt": []}, "invalid"),
        ({"prompt": "x", "model": "another"}, "invalid"),
        ({"prompt": "x y z", "route": "brief"}, "too_long"),
    ],
    ids=["context", "parameter", "constraint", "prompt", "model", "route"],
)
def test_a_request_that_cannot_be_done_is_counted_as_refused_and_nothing_else(
    served: Server, asked: dict[str, Any], reason: str, stream: bool
) -> None:
    before = served.counts()
    assert served.post(**{"model": MODEL, **asked}, stream=stream).status_code in (400, 404)
    assert changes(before, served.counts()) == {f"paceline_refused_total reason={reason}": 1}


def test_a_body_that_is_no_json_is_counted_as_refused(served: Server) -> None:
    before = served.counts()
    with served.client() as client:
        assert (
            client.post("completions", content=b"{", headers={"content-type": "application/json"}).status_code
            == 400
        )
    assert changes(before, served.counts()) == {"paceline_refused_total reason=invalid": 1}


def test_strangers_are_counted_once(served: Server) -> None:
    before = served.counts()
    assert served.post(key="x", prompt="x").status_code == 401
    assert changes(before, served.counts()) == {"paceline_refused_total reason=unauthorized": 1}


def test_who_comes_while_the_server_stops_is_counted(served: Server) -> None:
    before = served.counts()
    served.running.app.admission.open = False
    try:
        assert served.post(prompt="x").status_code == 503
    finally:
        served.running.app.admission.open = True
    assert changes(before, served.counts()) == {"paceline_refused_total reason=draining": 1}


def test_who_finds_the_queue_full_is_counted_as_refused_and_nothing_else(served: Server) -> None:
    with served.streaming(n=4):
        assert until(lambda: served.running.in_flight == 4, IDLE_S)
        before, known = work(served.counts()), set(served.records())
        found = served.post(prompt="Twice")
        assert (found.status_code, found.json()["error"]["code"]) == (429, "server_busy")
        assert changes(before, work(served.counts())) == {"paceline_refused_total reason=queue_full": 1}
        assert served.running.in_flight == 4
    served.settle()
    assert until(lambda: len(served.records()) == len(known) + 5, IDLE_S)
    refused = served.kept(found.headers["x-request-id"])
    assert (refused["finish"], refused["error"], refused["rounds"]) == ("refused", "server_busy", [])


def test_whose_time_is_up_in_the_queue_is_counted_as_refused_and_nothing_else(served: Server) -> None:
    with served.streaming(n=2):
        assert until(lambda: served.running.in_flight == 2, IDLE_S)
        before = work(served.counts())
        assert served.post(route="hasty", prompt="Twice").status_code == 408
        assert changes(before, work(served.counts())) == {"paceline_refused_total reason=deadline": 1}
    served.settle()


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_let_in_together_or_not_at_all(served: Server, stream: bool) -> None:
    with served.streaming(n=2):
        assert until(lambda: served.running.in_flight == 2, IDLE_S)
        found = served.post(prompt="Twice", n=3, max_tokens=1, stream=stream)  # two could wait
        assert (found.status_code, found.json()["error"]["code"]) == (429, "server_busy")
        assert served.running.in_flight == 2
    served.settle()


def test_only_the_first_output_of_a_request_has_to_find_room(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.running.app.engine.llm.engine
    submit, submitted = engine.submit, []

    def listening(seq: Seq, slots: int = 1) -> None:
        submitted.append(slots)
        submit(seq, slots)

    monkeypatch.setattr(engine, "submit", listening)
    assert served.post(prompt=["One", "Two"], n=2, max_tokens=1).status_code == 200
    assert submitted == [2, 0, 0, 0]


def test_who_finds_the_queue_full_is_charged_nothing(served: Server) -> None:
    with served.streaming(n=4):
        assert until(lambda: served.running.in_flight == 4, IDLE_S)
        busy = served.post(key=served.bert, prompt="x")
        assert busy.json()["error"]["code"] == "server_busy"
    served.settle()
    assert served.post(key=served.bert, prompt="x", max_tokens=1).status_code == 200
    before = served.counts()
    assert served.post(key=served.bert, prompt="x").json()["error"]["code"] == "rate_limit_exceeded"
    assert changes(before, served.counts()) == {"paceline_refused_total reason=key_limit": 1}


@pytest.fixture
def spans(served: Server, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(served.running.app.admission, "_spans", Spans(provider, keep_content=True))
    return exporter


def test_a_span_holds_the_text_where_it_may(served: Server, spans: InMemorySpanExporter) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    found = served.post("chat/completions", messages=chat, n=2, max_tokens=2).json()
    assert served.post(route="private", prompt="Hi", max_tokens=2).status_code == 200
    assert until(lambda: len(spans.get_finished_spans()) == 2, IDLE_S)
    kept, private = (dict(span.attributes or {}) for span in spans.get_finished_spans())
    told = json.loads(str(kept["gen_ai.input.messages"]))
    assert told == [{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}]
    answers = json.loads(str(kept["gen_ai.output.messages"]))
    texts = [choice["message"]["content"] for choice in found["choices"]]
    assert ["".join(p["content"] for p in answer["parts"]) for answer in answers] == texts
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    assert kept["gen_ai.usage.output_tokens"] == found["usage"]["completion_tokens"] == 4
    assert kept["gen_ai.usage.input_tokens"] == found["usage"]["prompt_tokens"]
    assert not [name for name in private if name.endswith(".messages")]
