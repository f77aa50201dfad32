"""Every parameter of the openai package's methods is decided about, in docs/server.md and in the models.

A new version of the package may bring a new parameter: this test then fails until there is a decision.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from paceline.config import SpecConfig
from paceline.server.openai.params import completion_params
from paceline.server.openai.protocol import ChatRequest, CompletionRequest, RequestBody
from paceline.server.openai.responses_protocol import ResponsesRequest
from paceline.web.api_errors import ApiError
from paceline.web.request_body import parse_request

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
METHODS: dict[str, tuple[Any, type[RequestBody]]] = {  # by the column of the table
    "chat": (Chat.create, ChatRequest),
    "completions": (Completions.create, CompletionRequest),
    "responses": (Responses.create, ResponsesRequest),
}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
NEEDED: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
IGNORED: dict[str, list[Any]] = {  # values that must be taken
    "access_programs": [{"cyber": "standard"}],
    "image": [{"context_compression": "auto"}],
    "max_tool_calls": [1, 7],
    "modalities": [["text"]],
    "prompt_cache_options": [{"mode": "implicit", "ttl": "30m"}],
    "prompt_cache_retention": ["in_memory", "24h"],
    "reasoning": [{"effort": effort, "summary": "auto"} for effort in EFFORTS],
    "reasoning_effort": list(EFFORTS),
    "service_tier": ["auto", "default", "flex", "scale", "priority", "fast"],
    "store": [True, False],
    "truncation": ["auto", "disabled"],
    "verbosity": ["low", "medium", "high"],
}
REFUSED: dict[str, list[Any]] = {  # values that must be refused by name
    "audio": [{"format": "wav", "voice": "alloy"}],
    "background": [True],
    "best_of": [3],
    "context_management": [[{"type": "compaction"}]],
    "conversation": ["conv_1"],
    "echo": [True],
    "function_call": [{"name": "f"}],
    "functions": [[{"name": "f", "parameters": {}}]],
    "moderation": [{"model": "omni-moderation-latest"}],
    "previous_response_id": ["resp_1"],
    "prompt": [{"id": "pmpt_1"}],
    "suffix": ["end"],
    "web_search_options": [{"search_context_size": "low"}],
}


def decisions() -> Iterator[tuple[str, str, str]]:
    """Parameter, method and decision, from the table."""
    section = DOCS.read_text().split("### Every parameter of OpenAI's", 1)[1].split("\n#", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line
    ]
    methods = rows[0][1:4]
    assert methods == list(METHODS)
    for row in rows[2:]:
        for parameter in re.findall(r"`(\w+)`", row[0]):
            yield from ((parameter, method, cell) for method, cell in zip(methods, row[1:4], strict=True))


TABLE = {(parameter, method): decision for parameter, method, decision in decisions() if decision}


def parameters(method: str) -> set[str]:
    return set(inspect.signature(METHODS[method][0]).parameters) - OF_THE_CLIENT


def parsed(method: str, **given: Any) -> RequestBody:
    request = parse_request({**NEEDED[method], **given}, METHODS[method][1])
    if isinstance(request, CompletionRequest):
        completion_params(request, "hi", SpecConfig(), {})
    return request


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_of_the_package_is_decided_about(method: str) -> None:
    decided = {parameter for parameter, of in TABLE if of == method}
    assert decided == parameters(method)
    assert set(TABLE.values()) == {"yes", "ignored", "refused"}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_said_to_be_done_is_done(method: str) -> None:
    fields = METHODS[method][1].model_fields
    assert parameters(method) <= set(fields)
    for (parameter, of), decision in TABLE.items():
        if of != method:
            continue
        assert parsed(method, **({} if parameter in NEEDED[method] else {parameter: None}))
        if decision == "ignored":
            for value in IGNORED[parameter]:
                assert parsed(method, **{parameter: value})
        elif decision == "refused":
            for value in REFUSED[parameter]:
                with pytest.raises(ApiError) as refusal:
                    parsed(method, **{parameter: value})
                assert refusal.value.param == parameter
        else:
            assert parameter not in IGNORED


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("chat", {"functions": [], "function_call": "auto", "web_search_options": {}, "logit_bias": {}}),
        ("chat", {"tools": [], "tool_choice": "auto", "stop": [], "skip_special_tokens": True}),
        ("completions", {"best_of": 2, "n": 2, "suffix": "", "echo": False}),
        ("responses", {"background": False, "context_management": [], "tools": [], "include": []}),
    ],
)
def test_what_says_as_little_as_nothing_is_taken(method: str, given: dict[str, Any]) -> None:
    assert parsed(method, **given)


def test_special_tokens_are_never_text() -> None:
    with pytest.raises(ApiError, match="special tokens are never part of a text") as refusal:
        parsed("chat", skip_special_tokens=False)
    assert refusal.value.param == "skip_special_tokens"
