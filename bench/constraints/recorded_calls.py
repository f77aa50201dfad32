"""Recorded turns that end in tool calls, and comparison of an answer's calls with them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from bench import workload
from paceline.text import Tokenizer, ToolCall

FILES: Final = {
    "bfcl": "traces/bfcl_single_turn.jsonl.gz",
    "tau-bench airline": "traces/tau_bench_airline_gpt4o.jsonl.gz",
}
MIN_TURNS: Final = 3  # calls of a conversation that is worth its prompt
MAX_TURNS: Final = 8  # of one conversation
_IGNORED: Final = re.compile(r"[ ,./\-_*^]")  # by BFCL's checker, in texts


@dataclass(frozen=True)
class Item:
    """A conversation up to where the assistant calls tools, and the calls recorded there."""

    workload: str
    id: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    reference: tuple[ToolCall, ...]

    @property
    def parallel(self) -> bool:
        return len(self.reference) > 1


def items(name: str, path: Path, tokenizer: Tokenizer, limit: int, max_prompt: int) -> list[Item]:
    """The first that fit, in the file's order, which says nothing; a conversation's turns stay together."""
    chosen: list[Item] = []
    for number, record in enumerate(workload.lines(path)):
        turns = list(_turns(name, record, number))
        several = len(record["messages"]) > 3
        if several and len(turns) < MIN_TURNS:
            continue
        fitting = [turn for turn in turns[:MAX_TURNS] if fits(turn, tokenizer, max_prompt)]
        if several and len(fitting) < MIN_TURNS:
            continue
        chosen += fitting
        if len(chosen) >= limit:
            break
    return chosen[:limit]


def _turns(name: str, record: Mapping[str, Any], number: int) -> Iterator[Item]:
    messages = record["messages"]
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("tool_calls") and i:
            calls = tuple(
                ToolCall(c["function"]["name"], json.loads(c["function"]["arguments"]))
                for c in message["tool_calls"]
            )
            id_ = f"{record.get('id', number)}#{i}"
            yield Item(name, id_, tuple(messages[:i]), tuple(record["tools"]), calls)


def fits(item: Item, tokenizer: Tokenizer, max_prompt: int) -> bool:
    text = tokenizer.render([dict(m) for m in item.messages], [dict(t) for t in item.tools])
    if len(text) > workload.LONGEST * max_prompt:
        return False
    return len(tokenizer.encode(text, bos=False)) <= max_prompt


def written_anyhow(text: str) -> list[ToolCall]:
    """Calls in a text that does not keep to the model's format: any JSON with a name and arguments."""
    decoder, at, found = json.JSONDecoder(), 0, []
    while (at := min((i for i in (text.find("{", at), text.find("[", at)) if i >= 0), default=-1)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        for call in value if isinstance(value, list) else [value]:
            if isinstance(call, dict) and isinstance(call.get("name"), str):
                arguments = call.get("arguments")
                found += [ToolCall(call["name"], arguments)] if isinstance(arguments, dict) else []
    return found


def valid(item: Item, calls: Sequence[ToolCall]) -> bool:
    """True if every call is of an offered tool, with arguments that its schema accepts."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in item.tools}
    return all(
        call.name in schemas and Draft202012Validator(schemas[call.name]).is_valid(call.arguments)
        for call in calls
    )


def matches(calls: Sequence[ToolCall], reference: Sequence[ToolCall]) -> bool:
    """The same calls, in any order.

    Each argument must be the recorded value: BFCL also takes others, and optional ones left out, by lists
    that the data no longer has. So this counts too few.
    """
    left = [_plain_call(call) for call in reference]
    for call in calls:
        if _plain_call(call) not in left:
            return False
        left.remove(_plain_call(call))
    return not left


def matches_but_for_optional(
    calls: Sequence[ToolCall], reference: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]]
) -> bool:
    """The same calls in the same order, which may have optional arguments more: counts too many."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if len(calls) != len(reference):
        return False
    for call, wanted in zip(calls, reference, strict=True):
        needed = {*wanted.arguments, *schemas.get(call.name, {}).get("required", ())}
        kept = {key: value for key, value in call.arguments.items() if key in needed}
        if not matches([ToolCall(call.name, kept)], [wanted]):
            return False
    return True


def _plain_call(call: ToolCall) -> tuple[str, Any]:
    return call.name, _plain(call.arguments)


def _plain(value: Any) -> Any:
    """As BFCL's checker compares it: texts without case, spaces and some punctuation, numbers as numbers."""
    if isinstance(value, str):
        return _IGNORED.sub("", value).lower().replace("'", '"')
    if isinstance(value, bool) or value is None:
        return str(value)  # True is no number here
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
