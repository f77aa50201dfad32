"""python -m bench tools: recorded tool calls, answered anew under the tools' schemas, plain and speculative.

Every list of drafters sees the same turns in the same order, with a suffix memory of its own that learns from
the turns before, as an agent's would. The prompt is in the cache before any of them answers, and their order
is drawn anew for each turn, so that a busy neighbour hits all alike. Temperature 0.
"""

import argparse
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder, workload
from bench.constraints import mask_cost
from bench.constraints.recorded_calls import FILES, Item, items, written_anyhow
from bench.constraints.tool_rows import COLUMNS, Answer, rows
from bench.table import Table
from paceline import LLM, SpecConfig
from paceline.constraints import Constraint, StructuralTag, tool_calls
from paceline.drafters.suffix import Suffix
from paceline.errors import ConstraintError
from paceline.text import parse_tool_calls
from paceline.types import Cursor, Finish, Round, Seq

PLAIN: Final = "none"
UNCONSTRAINED: Final = "unconstrained"
OWN_SUFFIX: Final = "suffix, joined"  # the memory of those that have the grammar too
SPECS: Final = {
    UNCONSTRAINED: SpecConfig((PLAIN,), max_draft=0),
    PLAIN: SpecConfig((PLAIN,), max_draft=0),
    "suffix": SpecConfig(("suffix",)),
    "grammar": SpecConfig(("grammar",)),
    "grammar,suffix": SpecConfig(("grammar", OWN_SUFFIX)),
}
MODEL: Final = "qwen2.5-coder-1.5b"


@dataclass
class Heard:
    """The rounds of the last sequence."""

    rounds: list[Round] = field(default_factory=list)

    def round(self, r: Round) -> None:
        self.rounds.append(r)

    def finish(self, seq: Seq, reason: Finish) -> None:
        return


class Bench:
    def __init__(self, model: str, max_tokens: int, seed: int = 0) -> None:
        joined = Suffix()
        joined.name = OWN_SUFFIX
        self.heard = Heard()
        self.llm = LLM(model, drafters=[joined], spec=SPECS[PLAIN], sinks=[self.heard])
        self.max_tokens = max_tokens
        self.rng = random.Random(seed)
        self.mask_ms: list[float] = []

    def measure(self, item: Item) -> dict[str, Answer]:
        """One answer for each list of drafters."""
        self.llm.generate(self._text(item), max_tokens=1, seed=0)  # fills the cache
        found = {name: self._answer(item, name) for name in self.rng.sample(list(SPECS), len(SPECS))}
        found[PLAIN].forced = self._forced(item, found[PLAIN].tokens)
        words = (self.llm.target.vocab_size + 31) // 32
        self.mask_ms += mask_cost.time_masks(self._cursor(item), found[PLAIN].tokens, words, self.rng)
        return found

    def _answer(self, item: Item, name: str) -> Answer:
        self.heard.rounds.clear()
        given: dict[str, Any] = {"max_tokens": self.max_tokens, "seed": 0, "spec": SPECS[name]}
        if name == UNCONSTRAINED:
            result = self.llm.generate(self._text(item), **given)
        else:
            tools, parallel = list(item.tools), item.parallel
            given |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": parallel}
            result = self.llm.generate(list(item.messages), **given)
        committing = [r for r in self.heard.rounds if r.tokens]
        written = self.llm.tokenizer.decode(result.token_ids)
        calls = parse_tool_calls(written, self.llm.tokenizer.tool_format)[1]
        return Answer(
            tokens=result.token_ids,
            sources=result.sources,
            passes=len(committing),
            drafted=dict(result.drafted),
            accepted=dict(result.accepted),
            seconds=result.seconds - (result.first_token_s or 0.0),
            timed_tokens=len(result.token_ids) - len(committing[0].tokens),
            complete=result.finish == "stop",
            calls=tuple(calls),
            anyhow=tuple(calls or written_anyhow(written)),
        )

    def _text(self, item: Item) -> str:
        return self.llm.tokenizer.render([dict(m) for m in item.messages], [dict(t) for t in item.tools])

    def _cursor(self, item: Item) -> Cursor:
        form = self.llm.tokenizer.tool_format
        constraint: Constraint | StructuralTag = tool_calls(item.tools, "required", form, item.parallel)
        return self.llm.constraints.cursor(constraint)

    def _forced(self, item: Item, tokens: Sequence[int]) -> int:
        """At how many positions of an output the grammar left no choice of the token."""
        cursor, forced = self._cursor(item), 0
        for token in tokens:
            forced += bool(cursor.forced())
            if not cursor.advance(token):
                break
        return forced


def measure(model: str, limit: int, max_prompt: int, max_tokens: int) -> dict[str, Any]:
    folder = workload.data_folder()
    if folder is None:
        raise SystemExit("no trace data here: PACELINE_DATA names its folder")
    bench = Bench(model, max_tokens)
    found: list[tuple[Item, dict[str, Answer]]] = []
    refused: list[str] = []
    for name, file in FILES.items():
        chosen = items(name, folder / file, bench.llm.tokenizer, limit, max_prompt)
        for number, item in enumerate(chosen, 1):
            try:
                found.append((item, bench.measure(item)))
            except ConstraintError as error:
                refused.append(f"{item.id}: {error}")
            print(f"{name} {number}/{len(chosen)} {item.id}", file=sys.stderr, flush=True)
    return {
        "settings": {"items": limit, "max_prompt": max_prompt, "max_tokens": max_tokens, "temperature": 0},
        "rows": [row for name in FILES for row in rows(name, [f for f in found if f[0].workload == name])],
        "masks": mask_cost.summary(bench.mask_ms, bench.llm.target.vocab_size),
        "refused": refused,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    parser = argparse.ArgumentParser(prog="python -m bench tools", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--items", type=int, default=40, help="turns of each workload")
    parser.add_argument("--max-prompt", type=int, default=5000, help="tokens; longer turns are passed over")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    options = parser.parse_args(given)
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": shlex.join(["python", "-m", "bench", "tools", *given]),
        **measure(options.model, options.items, options.max_prompt, options.max_tokens),
    }
    console = Console(width=None if Console().is_terminal else 200)
    console.print(Table.of(COLUMNS, result["rows"], f"tool calls, {options.model}").terminal())
    console.print(f"masks of a round: {result['masks']}", markup=False)
    for reason in result["refused"]:
        console.print(f"refused: {reason}", markup=False)
    if options.write:
        results_folder.write(result, f"tools-{options.model}")
        pages.write()
