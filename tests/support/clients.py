"""Actions of clients: turns of a conversation, commands of the CLI."""

import json
from typing import Any

import pytest

from paceline.cli import main

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOLD = {"get_weather": "The weather in a city.", "get_time": "The time in a city."}
ITEM_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": told, "parameters": CITY, "strict": True}
    for name, told in TOLD.items()
]
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters")}}
    for tool in ITEM_TOOLS
]
CITIES = (("Oslo", "Rome"), ("Bern", "Cairo"))
ASKED = "The weather in Paris and the time in Lima?"


def _calls(number: int, cities: tuple[str, str]) -> list[tuple[str, str, str]]:
    """Ids, names and arguments."""
    names = zip(TOLD, cities, strict=True)
    return [(f"call_{number}_{name}", name, json.dumps({"city": city})) for name, city in names]


def as_items() -> list[Any]:
    items: list[Any] = []
    for number, (here, there) in enumerate(CITIES):
        calls = _calls(number, (here, there))
        items.append({"role": "user", "content": f"The weather in {here} and the time in {there}?"})
        items += [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in calls]
        items += [{"type": "function_call_output", "call_id": i, "output": "12"} for i, _, _ in calls]
        items.append({"role": "assistant", "content": f"Rain in {here}, noon in {there}."})
    return [*items, {"role": "user", "content": ASKED}]


def as_messages() -> list[Any]:
    messages: list[Any] = []
    for number, (here, there) in enumerate(CITIES):
        calls = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
            for i, n, a in _calls(number, (here, there))
        ]
        messages.append({"role": "user", "content": f"The weather in {here} and the time in {there}?"})
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "12"} for call in calls]
        messages.append({"role": "assistant", "content": f"Rain in {here}, noon in {there}."})
    return [*messages, {"role": "user", "content": ASKED}]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("paceline: ")
    return err
