"""Faults beside the engine: a bad header, a failing sink, an internal error, a parameter given twice."""

import logging
import threading
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from paceline.config import SpecConfig
from paceline.errors import PacelineError, ShuttingDown
from paceline.server.admission import Admission, RequestContext
from paceline.server.model_pool import ModelPool, ServedModel
from paceline.server.openai.params import chat_params
from paceline.server.openai.protocol import ChatRequest
from paceline.server.request_log import RequestLog
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.otel import NO_SPANS
from paceline.text.chat_template import MAX_CACHED_VARIABLES, ChatTemplate
from paceline.web.api_errors import ApiError, api_error, log_and_convert
from paceline.web.request_body import parse_request

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "m", "messages": CHAT}


def an_http_request() -> Request:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "query_string": b"",
        "server": ("test", 80),
        "scheme": "http",
    }
    http = Request(scope)
    http.state.key = http.state.ticket = None
    http.state.large = False
    return http


def models() -> ModelPool:
    metrics = Metrics("m", (), running=lambda: 0, waiting=lambda: 0, cache_use=lambda: 0.0)
    return ModelPool([ServedModel(("m",), metrics)], load=lambda model: pytest.fail("nothing to load"))


def test_a_server_without_spans_does_not_read_trace_headers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        span = NO_SPANS.start("/v1/chat/completions", "m", Headers({"baggage": "secret; no=,,pair"}))
    assert not span.recording
    assert not caplog.records


class Ticket:
    def __init__(self) -> None:
        self.left: list[Any] = []

    def leave(self, *settled: Any) -> None:
        self.left.append(settled)


def test_a_failing_sink_does_not_keep_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    admission, ticket = Admission(models()), Ticket()
    admission.open = True
    context: RequestContext = admission.admit(an_http_request(), BODY, parse_request(BODY, ChatRequest), "x-")
    context.ticket = ticket  # type: ignore[assignment]
    log = RequestLog(models())

    def broken(*_: Any) -> None:
        raise RuntimeError("the sink is full")

    monkeypatch.setattr(log, "_report", broken)
    with pytest.raises(RuntimeError, match="sink"):
        log.finished(context)
    assert len(ticket.left) == 1


def named(error: PacelineError) -> ApiError:
    """As the server raises the API error of an engine's error."""
    try:
        raise api_error(error) from error
    except ApiError as raised:
        return raised


def test_the_log_has_every_error_that_becomes_a_500(caplog: pytest.LogCaptureFixture) -> None:
    for error in (ValueError("odd"), PacelineError("odd"), named(PacelineError("odd"))):
        caplog.clear()
        assert log_and_convert(error, "/v1/x").status == 500
        assert "/v1/x failed" in caplog.text
        assert "ApiError" not in caplog.records[0].getMessage()
    caplog.clear()
    assert log_and_convert(named(ShuttingDown()), "/v1/x").status == 503
    assert not caplog.records


@pytest.mark.parametrize(
    ("more", "param", "name"),
    [
        (
            {"speculative_config": {"max_draft": 1, "num_speculative_tokens": 1}},
            "num_speculative_tokens",
            "max_draft",
        ),
        ({"remember": True, "learn": True}, "learn", "remember"),
    ],
)
def test_two_names_of_one_parameter_are_not_taken_together(
    more: dict[str, Any], param: str, name: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request({**BODY, **more}, ChatRequest)
    assert (caught.value.param or "").endswith(param)
    assert caught.value.message.endswith(f"another name of '{name}': give one of them")


@pytest.mark.parametrize("schema", [False, 0])
def test_a_schema_that_python_takes_for_nothing_is_not_dropped(schema: Any) -> None:
    def read(outputs: dict[str, Any]) -> Any:
        request = parse_request({**BODY, "structured_outputs": outputs}, ChatRequest)
        return chat_params(request, SpecConfig(("none",)), {}, ChatTemplate({}, {}))

    with pytest.raises(ApiError, match="needs one of"):
        read({"json": schema, "regex": "a+"})
    assert read({"json": schema}).output.output is not None  # its compilation says why it cannot be used
    assert read({"json_object": False, "regex": "a+"}).output.output is not None


TEMPLATE = "{{ messages[-1].content }}{% if add_generation_prompt %}A{{ mood }}:{% endif %}"


def prompt_after(template: ChatTemplate, variables: dict[str, Any]) -> str:
    return template.generation_prompt(template.render(CHAT, None, True, variables), CHAT, None, variables)


def test_only_short_variables_that_the_template_reads_are_cached() -> None:
    template = ChatTemplate({"default": TEMPLATE}, {})
    for i in range(5):
        assert prompt_after(template, {"unread": f"{i}" * 5000}) == "A:"
    assert len(template._generation_prompts) == 1
    long = "x" * MAX_CACHED_VARIABLES
    assert prompt_after(template, {"mood": long}) == f"A{long}:"
    assert len(template._generation_prompts) == 1


def test_a_probe_that_adds_nothing_is_not_believed() -> None:
    source = "{{ messages[-1].content }}"
    source += "{% if add_generation_prompt and messages[-1].content != 'x' %}A:{% endif %}"
    assert prompt_after(ChatTemplate({"default": source}, {}), {}) == "A:"


def test_threads_that_clear_the_cache_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.chat_template.MAX_GENERATION_PROMPTS", 1)
    template = ChatTemplate({"default": TEMPLATE}, {})
    failed: list[Exception] = []

    def render(name: str) -> None:
        try:
            for i in range(100):
                assert prompt_after(template, {"mood": f"{name}{i % 2}"}) == f"A{name}{i % 2}:"
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=render, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
