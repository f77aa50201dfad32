"""The traces of a request: its labels always, its text only where that is switched on."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import BaseModel

from paceline.server.openai.protocol import ChatRequest, CompletionRequest
from paceline.server.openai.responses_protocol import ResponsesRequest
from paceline.trace.store import Store
from support.servers import IDLE_S, NAME, Running, toy_running, until

pytestmark = pytest.mark.slow

MODEL = NAME
SECRET = "xyzzy-plugh"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SHAPES: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
}
SCHEMA = {"type": "object", "properties": {SECRET: {"enum": [SECRET]}}, "required": [SECRET]}
STRUCTURED: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": SECRET}},
    {"structured_outputs": {"choice": [SECRET]}},
    {"structured_outputs": {"grammar": f'start: "{SECRET}"'}},
]
COMMON: list[dict[str, Any]] = [
    *STRUCTURED,
    {"stop": SECRET},
    {"stop": ["a", SECRET]},
    {"user": SECRET},
    {"prediction": {"type": "content", "content": SECRET}},
    {"prediction": {"type": "content", "content": [{"type": "text", "text": SECRET}]}},
]
FUNCTION = {"name": "xyzzy", "description": SECRET, "parameters": SCHEMA}
SALT: dict[str, Any] = {"cache_salt": SECRET}
WHOSE: list[dict[str, Any]] = [{"prompt_cache_key": SECRET}, {"safety_identifier": SECRET}, SALT]
HINTS: list[dict[str, Any]] = [{"prompt_cache_options": {SECRET: SECRET}}]
# Every parameter that can hold a text. Whatever else there is must not take one.
PLANTED: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        *COMMON,
        *WHOSE,
        *HINTS,
        {"messages": [{"role": "user", "content": SECRET}]},
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"tools": [{"type": "function", "function": {"name": SECRET}}], "tool_choice": SECRET},
        {"response_format": {"type": "json_schema", "json_schema": {"name": SECRET, "schema": SCHEMA}}},
        {"chat_template_kwargs": {"xyzzy": SECRET}},
    ],
    COMPLETIONS: [*COMMON, SALT, {"prompt": SECRET}, {"prompt": [SECRET, SECRET]}],
    RESPONSES: [
        *WHOSE,
        *HINTS,
        *({name: {SECRET: SECRET}} for name in ("access_programs", "client_metadata", "image")),
        {"chat_template_kwargs": {"xyzzy": SECRET}},
        {"stop": SECRET},
        {"stop": ["a", SECRET]},
        {"input": SECRET},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": SECRET}]}]},
        {"instructions": SECRET},
        {"tools": [{"type": "function", **FUNCTION}]},
        {
            "tools": [{"type": "function", "name": SECRET}],
            "tool_choice": {"type": "function", "name": SECRET},
        },
        {"text": {"format": {"type": "json_schema", "name": SECRET, "schema": SCHEMA}}},
        {"user": SECRET},
    ],
}
OTHERS = {
    path: [
        name
        for name, field in shape.model_fields.items()
        if name not in ("metadata", "model") and not any(name in asked for asked in PLANTED[path])
    ]
    for path, shape in SHAPES.items()
}
ROUTES = {"off": False, "on": True}


class Traced(NamedTuple):
    server: Running
    store: Path

    def ask(self, path: str, route: str = "", **asked: Any) -> httpx.Response:
        body = {"model": MODEL, **LEAST[path], **asked}
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.post(f"{self.server.url}{path}", json=body, headers={"x-text": route})

    def saved(self, *answers: httpx.Response) -> bytes:
        """All that is on the disk, once these are."""
        ids = [answer.json()["id"].encode() for answer in answers]
        assert until(lambda: all(name in self.written() for name in ids), IDLE_S)
        return self.written()

    def written(self) -> bytes:
        return b"".join(file.read_bytes() for file in self.store.parent.glob(f"{self.store.name}*"))

    def record(self, answer: httpx.Response) -> dict[str, Any]:
        self.saved(answer)
        with closing(Store.open(str(self.store))) as store:
            return next(found for found in store.export() if found["id"] == answer.json()["id"])


@pytest.fixture(scope="module", params=[False, True], ids=["off", "on"])
def traced(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Traced]:
    """Text is on or off for all, and for some routes otherwise."""
    folder = tmp_path_factory.mktemp("traces")
    routes = [
        {"name": name, "match": {"header": {"x-text": name}}, "trace_text": text}
        for name, text in ROUTES.items()
    ]
    (folder / "routes.yaml").write_text(json.dumps({"routes": routes}))
    store = folder / "traces.db"
    settings = {"store": str(store), "routes": str(folder / "routes.yaml"), "trace_text": request.param}
    with toy_running(folder, **settings) as found:
        yield Traced(found, store)


@pytest.mark.parametrize("path", SHAPES)
def test_no_parameter_leaves_its_text_where_that_is_off(traced: Traced, path: str) -> None:
    before = traced.written().count(SECRET.encode())
    answers = [traced.ask(path, "off", **asked) for asked in PLANTED[path]]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    found = traced.saved(*answers)
    assert found.count(SECRET.encode()) == before
    record = traced.record(answers[0])
    assert record["prompt_tokens"] > 0
    assert record["prompt_ids"] is record["output_ids"] is None
    assert all(r["tokens"] is r["draft_tokens"] is None for r in record["rounds"])


@pytest.mark.parametrize("path", SHAPES)
def test_other_parameters_take_no_text(traced: Traced, path: str) -> None:
    for name in OTHERS[path]:
        for planted in (SECRET, [SECRET], {SECRET: SECRET}, {"drafters": [SECRET]}):
            found = traced.ask(path, "off", **{name: planted})
            assert (name, found.status_code) == (name, 400)


@pytest.mark.parametrize("path", SHAPES)
def test_a_route_may_keep_its_texts(traced: Traced, path: str) -> None:
    record = traced.record(traced.ask(path, "on"))
    said = record["prompt"] or record["messages"][0]["content"]
    assert said == "hi"
    assert len(record["prompt_ids"]) == record["prompt_tokens"]
    assert len(record["rounds"][-1]["tokens"]) == 1


LABELS = {"run": "7", "team": "é" * 512, "k" * 64: ""}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_labels_are_kept_in_any_case(traced: Traced, path: str, route: str) -> None:
    answer = traced.ask(path, route, metadata=LABELS)
    assert traced.record(answer)["metadata"] == LABELS
    assert traced.record(traced.ask(path, route))["metadata"] == {}
    if path == RESPONSES:
        assert answer.json()["metadata"] == LABELS


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize(
    "labels",
    [{f"k{i}": "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}],
    ids=["too many", "long key", "long value"],
)
def test_labels_have_limits(traced: Traced, path: str, labels: dict[str, str]) -> None:
    found = traced.ask(path, metadata=labels)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "metadata")
