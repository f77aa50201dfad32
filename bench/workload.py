"""Prompts from recorded conversations: everything before an assistant's turn, which each system then writes.

A trace file is JSONL, gzipped or not. A line holds `messages` as OpenAI's chat API has them, and `tools` if
there are any; or, as in Spec-Bench, `turns`: a list of questions, of which the first is asked.
"""

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

ROOT: Final = Path(__file__).parent.parent
BUILT_IN: Final = Path(__file__).parent / "workloads"
SHARED: Final = {
    "tau-bench": "traces/tau_bench_airline_gpt4o.jsonl.gz",
    "bfcl-single": "traces/bfcl_single_turn.jsonl.gz",
    "bfcl-multi": "traces/bfcl_multi_turn.jsonl.gz",
    "livemcp": "traces/livemcpbench_claude_sonnet4.jsonl.gz",
    "swe": "traces/swe_moatless_claude35.jsonl.gz",
    "spec-bench": "specbench/question.jsonl",
}
FREE_TEXT: Final = ("spec-bench", "chat")  # the others are agents' turns
MAX_LINES: Final = 200  # of a file; their order says nothing
LONGEST: Final = 8  # more characters than that for each token allowed are not worth encoding
POLICY: Final = 1500  # characters kept of a system message that must be shortened


class Tokenizes(Protocol):
    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str: ...
    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    workload: str
    id: str
    tokens: tuple[int, ...]
    shortened: bool = False  # to fit the cap
    tools: tuple[dict[str, Any], ...] = field(default=(), compare=False, repr=False)
    calls: int = 0  # of tools, in the turn as it was recorded


@dataclass(frozen=True)
class Chat:
    """A conversation up to where the assistant speaks."""

    id: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    called: frozenset[str] = frozenset()  # tools used anywhere in the conversation
    calls: int = 0  # in the turn that follows, as it was recorded


def data_folder() -> Path | None:
    folder = Path(os.environ.get("PACELINE_DATA") or ROOT / "data")
    return folder if folder.is_dir() else None


def known() -> dict[str, Path]:
    """Workloads by name: those in the data folder, or else the small ones of the project."""
    folder = data_folder() or Path("-")
    found = {name: folder / file for name, file in SHARED.items() if (folder / file).is_file()}
    return found or {path.stem: path for path in sorted(BUILT_IN.glob("*.jsonl"))}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as text:
        for line in text:
            if line.strip():
                yield json.loads(line)


def chats(record: dict[str, Any], number: int) -> list[Chat]:
    """One for each turn of the assistant."""
    name = str(record.get("id") or record.get("question_id") or number)
    if "turns" in record:
        return [Chat(name, ({"role": "user", "content": record["turns"][0]},))]
    messages, tools = record["messages"], tuple(record.get("tools") or ())
    spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i]
    answered = spoken or ([len(messages)] if messages and messages[-1]["role"] != "assistant" else [])
    calls = [call for m in messages for call in m.get("tool_calls") or ()]
    called = frozenset(call["function"]["name"] for call in calls)
    return [Chat(f"{name}#{i}", tuple(messages[:i]), tools, called, _calls(messages[i:])) for i in answered]


def _calls(rest: Sequence[dict[str, Any]]) -> int:
    return len(rest[0].get("tool_calls") or ()) if rest else 0


def choose(
    name: str,
    path: Path,
    tokenizer: Tokenizes,
    limit: int,
    max_prompt: int,
    seed: int = 0,
    only: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> list[Prompt]:
    """At most `limit` prompts of at most `max_prompt` tokens, each of another conversation."""
    rng = random.Random(f"{seed} {name}")
    records = list(enumerate(islice(filter(only, lines(path)), MAX_LINES)))
    rng.shuffle(records)
    chosen: list[Prompt] = []
    for number, record in records:
        turns = chats(record, number)
        rng.shuffle(turns)
        fitting = (_fit(name, turn, tokenizer, max_prompt) for turn in turns[:3])
        if prompt := next(filter(None, fitting), None):
            chosen.append(prompt)
        if len(chosen) == limit:
            break
    return chosen


def conversations(
    name: str,
    path: Path,
    tokenizer: Tokenizes,
    limit: int,
    max_turns: int,
    max_prompt: int,
    seed: int = 0,
    only: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> list[list[Prompt]]:
    """At most `limit` conversations: the prompts of their first turns, in order, as far as they fit."""
    rng = random.Random(f"{seed} {name}")
    records = list(enumerate(islice(filter(only, lines(path)), MAX_LINES)))
    rng.shuffle(records)
    found: list[list[Prompt]] = []
    for number, record in records:
        turns = (_fit(name, turn, tokenizer, max_prompt) for turn in chats(record, number)[:max_turns])
        if prompts := [prompt for prompt in turns if prompt is not None]:
            found.append(prompts)
        if len(found) == limit:
            break
    return found


def _fit(name: str, chat: Chat, tokenizer: Tokenizes, max_prompt: int) -> Prompt | None:
    """The first way of putting it that is short enough; None if there is none."""
    from paceline.errors import TextError

    for number, way in enumerate(shorter(chat)):
        try:
            text = tokenizer.render(way.messages, way.tools or None)
        except TextError:
            return None
        if len(text) > LONGEST * max_prompt:
            continue
        tokens = tokenizer.encode(text, bos=False)
        if len(tokens) <= max_prompt:
            return Prompt(name, chat.id, tuple(tokens), number > 0, way.tools, chat.calls)
    return None


def shorter(chat: Chat) -> Iterator[Chat]:
    """The chat, then ever less of it: tools nobody calls, most of the policy, the oldest turns."""
    yield chat
    tools = tuple(tool for tool in chat.tools if tool["function"]["name"] in chat.called)
    if len(tools) < len(chat.tools):
        yield replace(chat, tools=tools)
    head = [m for m in chat.messages if m["role"] == "system"]
    rest = [m for m in chat.messages if m["role"] != "system"]
    policy = tuple({**m, "content": (m["content"] or "")[:POLICY]} for m in head)
    for start, message in enumerate(rest):
        if message["role"] == "user":
            yield replace(chat, tools=tools, messages=(*policy, *rest[start:]))


def alternating(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Shuffled, but taking turns between the workloads, so that a run cut short has some of each."""
    rng = random.Random(seed)
    piles: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        piles.setdefault(prompt.workload, []).append(prompt)
    for pile in piles.values():
        rng.shuffle(pile)
    order: list[Prompt] = []
    while any(piles.values()):
        order += [piles[name].pop() for name in rng.sample(list(piles), len(piles)) if piles[name]]
    return order
