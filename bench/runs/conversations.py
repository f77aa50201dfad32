"""Recorded conversations, and the requests that their turns make.

Where a model's chat template knows no tools, they are described in the system message, and calls and results
become plain text: servers would otherwise add tool prompts of their own, and read different prompts.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Final

from bench import workload
from paceline.errors import TextError
from paceline.text import Tokenizer
from paceline.text.chat_template import tool_prompt, without_tool_roles

FILES: Final = {  # below the data folder
    "api-bank": "traces/apibank.jsonl.gz",
    "tooltalk": "traces/tooltalk.jsonl.gz",
    "bfcl-multi": "traces/bfcl_multi_turn.jsonl.gz",
    "tau-bench": "traces/tau_bench_airline_gpt4o.jsonl.gz",
}
MAX_LINES: Final = 200  # read of a file; their order says nothing
MIN_TURNS: Final = 2
GREETING: Final = {"role": "user", "content": "Hello."}
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One recorded run of an agent."""

    source: str
    id: str
    messages: tuple[Message, ...] = field(repr=False)
    tools: tuple[dict[str, Any], ...] = field(repr=False)
    turns: tuple[int, ...]  # indexes of the assistant's messages that are generated
    prompt_tokens: tuple[int, ...]  # of each turn, by the model's own template and tokenizer

    @property
    def name(self) -> str:
        return f"{self.source} {self.id}"

    @property
    def head(self) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
        """The beginning that other runs of the agent share: system prompt and tools, before another user."""
        system = [m for m in self.messages[:1] if m["role"] == "system"]
        return [*system, GREETING], self.tools

    @property
    def head_id(self) -> str:
        return hashlib.sha256(json.dumps(self.head).encode()).hexdigest()[:16]


def files(sources: Sequence[str]) -> dict[str, Path]:
    """The file of each source. Absent data is an error that says where it belongs."""
    folder = workload.data_folder()
    if folder is None:
        raise SystemExit(
            "no recorded conversations here: set PACELINE_DATA to the folder that holds traces/, for "
            "instance PACELINE_DATA=data python -m bench runs"
        )
    if unknown := [name for name in sources if name not in FILES]:
        raise SystemExit(f"no source is called {unknown[0]!r}; there are {', '.join(FILES)}")
    if absent := [name for name in sources if not (folder / FILES[name]).is_file()]:
        raise SystemExit(f"{folder} has no {FILES[absent[0]]}: leave {absent[0]} out of --sources")
    return {name: folder / FILES[name] for name in sources}


def choose(
    tokenizer: Tokenizer, sources: Sequence[str], count: int, max_turns: int, max_prompt: int, seed: int = 0
) -> list[Conversation]:
    """So many conversations, the sources in turn, each as far as its prompts have max_prompt tokens."""
    piles = [
        islice(_fitting(name, path, tokenizer, max_turns, max_prompt, seed), count)
        for name, path in files(sources).items()
    ]
    mixed = (one for one in chain.from_iterable(zip_longest(*piles)) if one is not None)
    chosen = list(islice(mixed, count))
    if not chosen:
        raise SystemExit(f"no conversation has {MIN_TURNS} turns of {max_prompt} tokens: raise --max-prompt")
    return chosen


def _fitting(
    name: str, path: Path, tokenizer: Tokenizer, max_turns: int, max_prompt: int, seed: int
) -> Iterator[Conversation]:
    records = list(islice(workload.lines(path), MAX_LINES))
    random.Random(f"{seed} {name}").shuffle(records)
    for number, record in enumerate(records):
        one = conversation(name, record, tokenizer, max_turns, max_prompt, number)
        if one is not None:
            yield one


def conversation(
    source: str,
    record: dict[str, Any],
    tokenizer: Tokenizer,
    max_turns: int,
    max_prompt: int,
    number: int = 0,
) -> Conversation | None:
    """None: fewer than two turns fit, or the template refuses the messages."""
    messages, tools = list(record["messages"]), tuple(record.get("tools") or ())
    if not tokenizer.template.reads("tools"):
        messages = without_tool_roles(messages, tool_prompt(tools) if tools else "")
        tools = ()
    turns, lengths = list[int](), list[int]()
    for index in _turns(messages)[:max_turns]:
        try:
            length = len(tokenizer.encode_chat(messages[:index], tools or None))
        except TextError:
            break
        if length > max_prompt:
            break
        turns.append(index)
        lengths.append(length)
    if len(turns) < MIN_TURNS:
        return None
    id = str(record.get("id") or number)
    return Conversation(source, id, tuple(messages), tools, tuple(turns), tuple(lengths))


def _turns(messages: Sequence[Message]) -> list[int]:
    """The assistant's messages that answer somebody else's."""
    roles = [message["role"] for message in messages]
    return [i for i, role in enumerate(roles) if i and role == "assistant" and roles[i - 1] != "assistant"]
