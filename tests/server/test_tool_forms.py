"""Tool calls in other forms than the declared one, over HTTP: whole, streamed, counted, raw text at hand."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.constraints import Choice, OutputSpec
from paceline.llm import LLM
from paceline.types import Cursor
from support.clients import CITY
from support.servers import Running, toy_running

WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
FENCED = f"```json\n{CALL}\n```"
EXAMPLE = f"Write this:\n{FENCED}\nand wait."
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "The weather in Oslo?"}],
    "tools": [WEATHER],
    "temperature": 0,
    "max_completion_tokens": 300,
}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text that the model writes."""
    text: list[str] = []

    def cursor(self: LLM, output: OutputSpec, prompt_end: str, ignore_eos: bool) -> Cursor:
        return self.constraints.cursor(Choice((text[-1],)), ignore_eos)

    monkeypatch.setattr(LLM, "_cursor", cursor)
    return text


def counts(server: Running) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics").text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    return {f"{s.name} {''.join(s.labels.values())}": s.value for s in samples if "tool_calls" in s.name}


def more(server: Running, before: dict[str, float]) -> dict[str, float]:
    found = {name: value - before.get(name, 0) for name, value in counts(server).items()}
    return {name.removeprefix("paceline_"): value for name, value in found.items() if value}


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        (CALL, None, 1),
        (FENCED, None, 1),
        (f"I look.\n{FENCED}", "I look.", 1),
        (f"[{CALL}, {CALL}]", None, 2),
        (EXAMPLE, EXAMPLE, 0),
        (f"{FENCED}\nThat asks.", "\nThat asks.", 1),
        (CALL.replace("get_weather", "get_time"), CALL.replace("get_weather", "get_time"), 0),
    ],
)
def test_an_answer_says_the_same_whole_and_streamed(
    toy_server: Running, written: list[str], text: str, content: str | None, called: int
) -> None:
    written.append(text)
    client = toy_server.client()
    whole = client.chat.completions.create(model=toy_server.model, **ASKED).choices[0]
    calls: list[Any] = list(whole.message.tool_calls or ())
    assert (whole.message.content, len(calls)) == (content, called)
    assert whole.finish_reason == ("tool_calls" if called else "stop")
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("get_weather", '{"city": "Oslo"}')
    ] * called

    plain: Any = {"speculative_config": {"drafters": []}}  # a token in each round
    parts = list(
        client.chat.completions.create(model=toy_server.model, stream=True, extra_body=plain, **ASKED)
    )
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    names = [(c.index, c.function.name) for c in streamed if c.function and c.function.name]
    assert names == [(i, "get_weather") for i in range(called)]
    for i in range(called):
        parts_of = [c.function.arguments or "" for c in streamed if c.function and c.index == i]
        assert "".join(parts_of) == '{"city": "Oslo"}'
        assert (len(parts_of) > 1) == text.startswith(("{", "[", "`"))  # as it is written
    assert parts[-1].choices[0].finish_reason == whole.finish_reason


def test_responses_have_them_as_items(toy_server: Running, written: list[str]) -> None:
    written.append(f"I look.\n{FENCED}")
    tool = {"type": "function", "strict": False, **WEATHER["function"]}
    asked: dict[str, Any] = {"model": toy_server.model, "input": "Oslo?", "tools": [tool], "temperature": 0}
    found = toy_server.client().responses.create(**asked)
    assert [item.type for item in found.output] == ["message", "function_call"]
    assert found.output_text == "I look."
    events = list(toy_server.client().responses.create(**asked, stream=True))
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]


def test_calls_and_texts_that_only_look_like_calls_are_counted(
    toy_server: Running, written: list[str]
) -> None:
    for text, counted in (
        (FENCED, {"tool_calls_total other": 1.0}),
        (f"<tool_call>\n{CALL}\n</tool_call>", {"tool_calls_total declared": 1.0}),
        (EXAMPLE, {"rejected_tool_calls_total followed_by_text": 1.0}),
        ("I look.\n" + CALL.replace("Oslo", "Oslo\\ud800"), {"rejected_tool_calls_total arguments": 1.0}),
        ("Just words.", {}),
    ):
        written.append(text)
        before = counts(toy_server)
        toy_server.client().chat.completions.create(model=toy_server.model, **ASKED)
        assert more(toy_server, before) == counted


def test_the_raw_text_stays_available(toy_server: Running, written: list[str]) -> None:
    written.append(FENCED)
    body = {"model": toy_server.model, "metrics": "detailed", **ASKED}
    found = httpx.post(f"{toy_server.url}/v1/chat/completions", json=body).json()
    assert found["metrics"]["raw_text"] == FENCED
    assert found["choices"][0]["message"]["content"] is None
    body["metrics"] = True
    assert "raw_text" not in httpx.post(f"{toy_server.url}/v1/chat/completions", json=body).json()["metrics"]


def test_none_and_required_look_for_no_other_form(toy_server: Running, written: list[str]) -> None:
    written.append(FENCED)
    for choice in ("none", "required"):
        found = toy_server.client().chat.completions.create(
            model=toy_server.model,
            tool_choice=choice,
            **ASKED,
        )
        assert (found.choices[0].message.content, found.choices[0].message.tool_calls) == (FENCED, None)


def test_a_server_takes_a_template_and_a_tool_format(tmp_path: Path) -> None:
    template = "{% for m in messages %}given {{ m.content }}{% endfor %}"
    with toy_running(tmp_path, chat_template=template, tool_format="mistral") as server:
        tokenizer = server.app.engine.llm.tokenizer
        assert tokenizer.render([{"role": "user", "content": "x"}]) == "given x"
        assert tokenizer.tool_format.name == "mistral"
        found = server.client().chat.completions.create(model=server.model, tool_choice="required", **ASKED)
        calls: list[Any] = list(found.choices[0].message.tool_calls or ())
        assert len(calls[0].id) == 9  # as Mistral's templates take them
