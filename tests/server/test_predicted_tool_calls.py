"""Predicted tool calls over HTTP: an event before the prompt is read, a field, metrics."""

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.config import EngineConfig
from paceline.constraints import Choice, OutputSpec
from paceline.llm import LLM
from paceline.server.tool_prediction.predictor_files import clear
from paceline.trace.store import Store
from paceline.types import Cursor
from support.agent_runs import FUNCTIONS, SAFE, Shop
from support.servers import Running, toy_running

TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS.values()]
HINTED: list[Any] = [
    {**tool, "annotations": {"readOnlyHint": tool["function"]["name"] in SAFE}} for tool in TOOLS
]
WISH = {"safe_tools": list(SAFE), "min_probability": 0.5}
RUNS = 5


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text that the model writes."""
    text: list[str] = []

    def cursor(self: LLM, output: OutputSpec, prompt_end: str, ignore_eos: bool) -> Cursor:
        return self.constraints.cursor(Choice((text[-1],)), ignore_eos)

    monkeypatch.setattr(LLM, "_cursor", cursor)
    return text


class Client:
    def __init__(self, server: Running, written: list[str]) -> None:
        self.server, self.written = server, written
        self.http = httpx.Client(base_url=server.url, trust_env=False, timeout=60)

    def body(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        return {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **more}

    def ask(self, messages: list[Any], calls: list[Any], **more: Any) -> dict[str, Any]:
        """The answer that has these calls."""
        self.written.append(answer(calls))
        found = self.http.post("/v1/chat/completions", json=self.body(messages, **more))
        whole: dict[str, Any] = found.raise_for_status().json()
        return whole

    def stream(self, messages: list[Any], calls: list[Any], **more: Any) -> list[dict[str, Any]]:
        self.written.append(answer(calls))
        body = self.body(messages, stream=True, **more)
        with self.http.stream("POST", "/v1/chat/completions", json=body) as found:
            lines = [line.removeprefix("data: ") for line in found.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def teach(self, user: str | None, **more: Any) -> None:
        shop = Shop(random.Random(0))
        for _ in range(RUNS):
            for messages, calls in shop.run():
                self.ask(messages, calls, user=user, **{"predict_tool_calls": WISH, **more})

    def counts(self) -> dict[str, float]:
        page = self.http.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        return {
            s.labels["outcome"]: s.value for s in samples if s.name == "paceline_predicted_tool_calls_total"
        }


def answer(calls: list[Any]) -> str:
    made = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in made) or "They are on their way."


@pytest.fixture
def client(toy_server: Running, written: list[str]) -> Iterator[Client]:
    found = Client(toy_server, written)
    yield found
    found.http.close()


def predicted(whole: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in whole["predicted_tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def without_names(chunk: dict[str, Any]) -> Any:
    """A chunk without what differs from request to request: ids and times."""
    text = json.dumps({**chunk, "created": 0})
    return json.loads(text, object_hook=lambda member: {k: v for k, v in member.items() if k != "id"})


def test_calls_are_predicted_before_the_prompt_is_read_and_the_rest_of_the_stream_is_the_same(
    client: Client,
) -> None:
    client.teach("anna")
    run = list(Shop(random.Random(9)).run())
    same: Any = {
        "user": "anna",
        "remember": False,
        "speculative_config": {"disabled": True},
    }  # and chunks as well
    early = 0
    for messages, calls in run:
        chunks = client.stream(messages, calls, **same, predict_tool_calls=WISH)
        plain = client.stream(messages, calls, **same)
        ahead = [chunk for chunk in chunks if "predicted_tool_calls" in chunk]
        assert all(chunk["choices"] == [] for chunk in ahead)
        rest = [chunk for chunk in chunks if "predicted_tool_calls" not in chunk]
        assert list(map(without_names, rest)) == list(map(without_names, plain))
        if calls and chunks[1] in ahead and predicted(chunks[1]) == [tuple(c) for c in calls]:
            early += 1
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert 0.5 <= chunks[1]["predicted_tool_calls"][0]["probability"] <= 1
    assert early >= len(run) - 2


def test_a_whole_answer_has_them_as_a_field_and_metrics_count_them(client: Client) -> None:
    client.teach("berta")
    messages, calls = next(Shop(random.Random(9)).run())
    before = client.counts()
    right = client.ask(messages, calls, user="berta", remember=False, predict_tool_calls=WISH)
    assert predicted(right) == [tuple(call) for call in calls]
    wrong = client.ask(messages, [], user="berta", remember=False, predict_tool_calls=WISH)
    assert predicted(wrong) == predicted(right)
    counts = {outcome: n - before.get(outcome, 0) for outcome, n in client.counts().items()}
    assert counts == {"right": 1.0, "wrong": 1.0, "missed": 0.0}


def test_traces_record_what_became_of_them(tmp_path: Path, written: list[str]) -> None:
    store = str(tmp_path / "traces.db")
    with toy_running(tmp_path, store=store) as server:
        asking = Client(server, written)
        asking.teach("berta")
        messages, calls = next(Shop(random.Random(9)).run())
        right = asking.ask(messages, calls, user="berta", remember=False, predict_tool_calls=WISH)
        wrong = asking.ask(messages, [], user="berta", remember=False, predict_tool_calls=WISH)
        plain = asking.ask(messages, calls, user="berta", remember=False)
        asking.http.close()
    with closing(Store.open(store)) as traces:
        found = [traces.get(answer["id"]) for answer in (right, wrong, plain)]
    outcomes = [None if one is None else one[0].predicted_calls for one in found]
    assert outcomes == [{"right": 1, "wrong": 0, "missed": 0}, {"right": 0, "wrong": 1, "missed": 0}, {}]


def test_nobody_else_learns_of_them(client: Client) -> None:
    client.teach("carla")
    messages, calls = next(Shop(random.Random(9)).run())
    wish: Any = {"predict_tool_calls": WISH}
    assert predicted(client.ask(messages, calls, user="carla", **wish))
    assert not predicted(client.ask(messages, calls, user="dora", **wish))
    assert not predicted(client.ask(messages, calls, user="carla", cache_salt="x", **wish))
    assert not predicted(client.ask(messages, calls, **wish))  # without a name
    assert "predicted_tool_calls" not in client.ask(messages, calls, user="carla")
    assert "predicted_tool_calls" not in client.ask(messages, calls, user="carla", predict_tool_calls=False)


def test_requests_that_are_not_remembered_and_strangers_teach_nothing(client: Client) -> None:
    client.teach("elsa", remember=False)
    client.teach(None)
    messages, calls = next(Shop(random.Random(9)).run())
    for user in ("elsa", None):
        assert not predicted(client.ask(messages, calls, user=user, predict_tool_calls=WISH))


def test_only_safe_tools_are_predicted_and_hints_mark_them(client: Client) -> None:
    client.teach("fina", tools=HINTED, predict_tool_calls=True)
    messages, calls = next(Shop(random.Random(9)).run())
    hinted = client.ask(messages, calls, user="fina", remember=False, tools=HINTED, predict_tool_calls=True)
    assert predicted(hinted) == [tuple(call) for call in calls]
    unmarked = client.ask(messages, calls, user="fina", remember=False, predict_tool_calls=True)
    assert unmarked["predicted_tool_calls"] == []


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"safe": []}, "predict_tool_calls.safe"),
        ({"min_probability": 2}, "predict_tool_calls.min_probability"),
        ({"max_calls": 0}, "predict_tool_calls.max_calls"),
        ("yes", "predict_tool_calls"),
    ],
)
def test_a_wish_that_cannot_be_read_is_a_400_that_names_it(client: Client, wish: Any, param: str) -> None:
    client.written.append("x")
    messages = [{"role": "user", "content": "x"}]
    found = client.http.post("/v1/chat/completions", json=client.body(messages, predict_tool_calls=wish))
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)


def test_an_error_before_the_answer_keeps_its_status(client: Client) -> None:
    client.written.append("x")
    messages = [{"role": "user", "content": "x" * 100_000}]
    body = client.body(messages, stream=True, user="gina", predict_tool_calls=WISH)
    assert client.http.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.slow
def test_they_outlive_the_server(tmp_path: Path, written: list[str]) -> None:
    messages, calls = next(Shop(random.Random(9)).run())
    for disk_mb, first, second in ((8, False, True), (0, False, False)):
        seen = []
        for _ in range(2):
            engine = EngineConfig("cpu", cache_mb=64, cache_disk_mb=disk_mb, cache_dir=str(tmp_path / "kv"))
            with toy_running(tmp_path, engine) as server:
                client = Client(server, written)
                seen.append(predicted(client.ask(messages, calls, user="ida", predict_tool_calls=WISH)) != [])
                client.teach("ida")
                client.http.close()
        assert seen == [first, second]
        clear(tmp_path / "kv")


def test_responses_have_them_as_an_event_and_a_field(client: Client) -> None:
    """Learned from chats and responses alike: a tenant has one history."""
    client.teach("hanna")
    messages, calls = next(Shop(random.Random(9)).run())
    (system, user) = messages[:2] if messages[0]["role"] == "system" else ({"content": ""}, messages[0])
    body: dict[str, Any] = {
        "input": user["content"],
        "instructions": system["content"] or None,
        "tools": [{"type": "function", **function} for function in FUNCTIONS.values()],
        "temperature": 0,
        "user": "hanna",
        "remember": False,
    }
    client.written.append(answer(calls))
    plain = client.http.post("/v1/responses", json=body).raise_for_status().json()
    assert "predicted_tool_calls" not in plain
    body["predict_tool_calls"] = WISH
    whole = client.http.post("/v1/responses", json=body).raise_for_status().json()
    assert predicted(whole) == [tuple(call) for call in calls]
    with client.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as found:
        lines = [line.removeprefix("data: ") for line in found.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.predicted_tool_calls"]
    assert predicted(events[2]) == predicted(events[-1]["response"]) == predicted(whole)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    hinted = [
        {"type": "function", "annotations": {"readOnlyHint": name in SAFE}, **function}
        for name, function in FUNCTIONS.items()
    ]
    marked = client.http.post("/v1/responses", json=body | {"tools": hinted, "predict_tool_calls": True})
    assert predicted(marked.raise_for_status().json()) == predicted(whole)
    refused = client.http.post("/v1/responses", json=body | {"predict_tool_calls": {"max_calls": 0}})
    assert refused.json()["error"]["param"] == "predict_tool_calls.max_calls"
