"""What is counted, charged and kept of a request: of one that leaves, one that is refused, one that fails."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from metric_cases import samples
from running import IDLE_S, Running, running, until

from paceline.config import EngineConfig
from paceline.trace.store import Store

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ROUTES = [{"name": "hasty", "match": {"header": {"x-route": "hasty"}}, "timeout_s": 1}]


class Server(NamedTuple):
    running: Running
    store: str

    def post(self, path: str = "completions", route: str = "", **asked: Any) -> httpx.Response:
        body = {"model": MODEL, **asked}
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.post(f"{self.running.url}/v1/{path}", json=body, headers={"x-route": route})

    @contextmanager
    def streaming(self, **asked: Any) -> Iterator[str]:
        """The id of an answer that is being written."""
        body = {"model": MODEL, "prompt": "Once", "stream": True, **LONG, **asked}
        url = f"{self.running.url}/v1/completions"
        with httpx.Client(trust_env=False, timeout=60) as client, client.stream("POST", url, json=body) as r:
            assert r.status_code == 200
            next(r.iter_lines())
            yield r.headers["x-request-id"]

    def kept(self, name: str) -> dict[str, Any]:
        assert until(lambda: name in self.records(), IDLE_S)
        return self.records()[name]

    def records(self) -> dict[str, dict[str, Any]]:
        with closing(Store.open(self.store)) as store:
            return {found["id"]: found for found in store.export()}

    def counts(self) -> dict[str, float]:
        """Every counter and the number of observations of every histogram, with its labels."""
        found = samples(self.running.app.reception.metrics)
        return {
            " ".join([name, *sorted(f"{k}={v}" for k, v in labels if k != "model_name")]): value
            for (name, labels), value in found.items()
            if name.endswith(("_total", "_count"))
        }

    def settle(self) -> None:
        assert until(lambda: self.running.in_flight == 0, IDLE_S)


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    moved = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in moved.items() if value}


@pytest.fixture(scope="module")
def served(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two run, two wait."""
    folder = tmp_path_factory.mktemp("accounts")
    (folder / "routes.yaml").write_text(json.dumps({"routes": ROUTES}))
    config = EngineConfig(cache_mb=64, max_batch=2, max_waiting=2)
    settings = {"store": str(folder / "traces.db"), "routes": str(folder / "routes.yaml"), "trace_text": True}
    with running(MODEL, config, **settings) as found:
        yield Server(found, settings["store"])


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
    with httpx.Client(trust_env=False, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{served.running.url}/v1/completions", json={"model": MODEL, "prompt": "Once", **LONG})
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
    tokenizer = served.running.app.service.llm.tokenizer
    assert '"look"' in record["output"]
    assert record["output"].strip() in tokenizer.decode(record["output_ids"])
