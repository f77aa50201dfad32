"""python -m bench tool-calls: calls that a model makes by itself, under tool_choice auto, and who reads them.

The model answers recorded turns twice, at temperature 0: free, with no grammar at all, and under `auto`,
where a call is enforced from its beginning on. The free answers are then read by paceline, as the template
declares calls and in every form, and by vLLM's parsers. llama.cpp's server writes its own answers.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder, workload
from bench.constraints.recorded_calls import (
    FILES,
    Item,
    fits,
    items,
    matches_but_for_optional,
    valid,
    written_anyhow,
)
from bench.constraints.vllm_parsers import PARSERS, VllmParser
from bench.table import Column, Table
from paceline import LLM, EngineConfig, hub
from paceline.constraints import OutputSpec, ToolSchemas
from paceline.text import ToolCall, parse_tool_calls

NO_CALL: Final = "bfcl irrelevance"  # turns in which no tool helps: nothing should be called
NO_CALL_FILE: Final = "traces/bfcl_irrelevance.jsonl.gz"
MAX_PROMPT: Final = {"bfcl": 420, NO_CALL: 420, "tau-bench airline": 6500}  # tokens
Reader = Callable[[Item, str], Sequence[ToolCall]]

COLUMNS: Final = (
    Column("turns", "workload"),
    Column("answers by", "answers"),
    Column("read by", "reader"),
    Column("n", "n"),
    Column("written", "written"),
    Column("read", "read"),
    Column("tool recorded", "tool"),
    Column("as recorded", "as_recorded"),
    Column("read, not valid", "invalid"),
)


@dataclass(frozen=True)
class Turn:
    """A recorded turn, the model's free answer, and the calls it made under auto."""

    item: Item
    free: str
    auto: tuple[ToolCall, ...]
    auto_text: str

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Turn":
        item = Item(
            stored["workload"],
            stored["id"],
            tuple(stored["messages"]),
            tuple(stored["tools"]),
            tuple(ToolCall(name, arguments) for name, arguments in stored["reference"]),
        )
        auto = tuple(ToolCall(name, arguments) for name, arguments in stored["auto"])
        return cls(item, stored["free"], auto, stored["auto_text"])

    def stored(self) -> dict[str, Any]:
        return {
            "id": self.item.id,
            "workload": self.item.workload,
            "messages": self.item.messages,
            "tools": self.item.tools,
            "reference": [[call.name, call.arguments] for call in self.item.reference],
            "free": self.free,
            "auto": [[call.name, call.arguments] for call in self.auto],
            "auto_text": self.auto_text,
        }


def turns(llm: LLM, data: Path, limits: Mapping[str, int]) -> list[Item]:
    chosen = [
        item
        for name, file in FILES.items()
        for item in items(name, data / file, llm.tokenizer, limits[name], MAX_PROMPT[name])
    ]
    without = (
        Item(NO_CALL, str(record["id"]), tuple(record["messages"]), tuple(record["tools"]), ())
        for record in workload.lines(data / NO_CALL_FILE)
        if record["tools"]
    )
    fitting = [item for item in without if fits(item, llm.tokenizer, MAX_PROMPT[NO_CALL])]
    return sorted([*chosen, *fitting[: limits[NO_CALL]]], key=lambda item: item.workload)


def answer(llm: LLM, item: Item, max_tokens: int) -> Turn:
    messages, tools = [dict(m) for m in item.messages], [dict(t) for t in item.tools]
    given: dict[str, Any] = {"max_tokens": max_tokens, "seed": 0}
    free = llm.generate(llm.tokenizer.render(messages, tools), **given)
    auto = llm.generate(messages, tools=tools, tool_choice="auto", **given)
    return Turn(item, free.text, auto.tool_calls, auto.text)


def answers(llm: LLM, path: Path, chosen: Iterable[Item], max_tokens: int) -> list[Turn]:
    """From the file; those that it lacks are written first, and added to it."""
    found = [Turn.of(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    known = {turn.item.id for turn in found}
    with path.open("a") as file:
        for item in chosen:
            if item.id not in known:
                found.append(answer(llm, item, max_tokens))
                file.write(json.dumps(found[-1].stored()) + "\n")
                file.flush()
    return found


def readers(llm: LLM, vllm: Path | None) -> dict[str, Reader]:
    form = llm.tokenizer.tool_format

    def in_any_form(item: Item, text: str) -> Sequence[ToolCall]:
        calls = OutputSpec(item.tools).unmarked_calls
        offered = None if calls is None else ToolSchemas(calls.schemas, llm.constraints.checker(calls))
        return parse_tool_calls(text, form, offered)[1]

    found: dict[str, Reader] = {
        "paceline, declared format": lambda item, text: parse_tool_calls(text, form)[1],
        "paceline": in_any_form,
    }
    for name in PARSERS if vllm else ():
        parser = VllmParser(vllm, name)  # type: ignore[arg-type]  # no folder, no names
        found[f"vLLM, {name}"] = lambda item, text, parser=parser: parser.calls(text)  # type: ignore[misc]
    return found


def row(
    name: str, by: str, reader: str, read: Sequence[tuple[Item, Sequence[ToolCall], bool]]
) -> dict[str, Any]:
    """read: each turn, the calls read, and whether its answer has a call in any form."""
    called = [(item, calls) for item, calls, _ in read if calls]
    return {
        "workload": name,
        "answers": by,
        "reader": reader,
        "n": len(read),
        "written": sum(written for *_, written in read),
        "read": len(called),
        "tool": sum({c.name for c in calls} <= {c.name for c in item.reference} for item, calls in called),
        "as_recorded": sum(
            matches_but_for_optional(calls, item.reference, item.tools) for item, calls in called
        ),
        "invalid": sum(not valid(item, calls) for item, calls in called),
    }


def rows(
    found: Sequence[Turn], read_by: Mapping[str, Reader], llama: Mapping[str, Any]
) -> list[dict[str, Any]]:
    table = []
    for name in sorted({turn.item.workload for turn in found}):
        here = [turn for turn in found if turn.item.workload == name]
        for reader, read in read_by.items():
            texts = [(t.item, read(t.item, t.free), bool(written_anyhow(t.free))) for t in here]
            table.append(row(name, "the model, free", reader, texts))
        auto = [(t.item, t.auto, bool(t.auto or written_anyhow(t.auto_text))) for t in here]
        table.append(row(name, "the model, auto", "paceline", auto))
        own = [(t.item, *llama_calls(llama[t.item.id])) for t in here if t.item.id in llama]
        if own:
            table.append(row(name, "llama.cpp, auto", "llama.cpp", own))
    return table


def llama_calls(reply: Mapping[str, Any]) -> tuple[list[ToolCall], bool]:
    message = reply["choices"][0]["message"]
    calls = [
        ToolCall(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return calls, bool(calls or written_anyhow(message.get("content") or ""))


def stored_llama(path: Path | None) -> dict[str, Any]:
    lines = path.read_text().splitlines() if path else []
    return {stored["id"]: stored["answer"] for stored in map(json.loads, lines)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--answers", type=Path, required=True, help="a file that keeps the answers")
    parser.add_argument("--turns", default="26,8,8", help="of BFCL, its irrelevance turns, tau-bench")
    parser.add_argument("--max-tokens", type=int, default=110)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--vllm", type=Path, help="vllm/tool_parsers of a checkout")
    parser.add_argument("--llama", type=Path, help="from python -m bench.constraints.llama_calls")
    parser.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    options = parser.parse_args(arguments)
    data = workload.data_folder()
    if data is None:
        raise SystemExit("the recorded turns are missing: name their folder with PACELINE_DATA")
    llm = LLM(options.model, config=EngineConfig(threads=options.threads))
    counts = map(int, options.turns.split(","))
    limits = dict(zip(("bfcl", NO_CALL, "tau-bench airline"), counts, strict=True))
    found = answers(llm, options.answers, turns(llm, data, limits), options.max_tokens)
    measured = rows(found, readers(llm, options.vllm), stored_llama(options.llama))
    Console().print(Table.of(COLUMNS, measured).terminal(sections=1))
    if options.write:
        facts = {"model": machine.called(options.model), **machine.facts()}
        command = machine.command("tool-calls", arguments or [])
        result = {"machine": facts, "command": command, "max_tokens": options.max_tokens, "rows": measured}
        results_folder.write(result, f"tool_calls-{facts['model']}")
        pages.write()


if __name__ == "__main__":
    main()
