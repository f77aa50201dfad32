"""python -m bench schemas: every recorded JSON Schema compiled, followed by a model, and checked.

A model writes for each schema twice, plain and with drafts, by the same seed: token for token the same is
expected, and JSON that the schema takes where the model came to an end. Recorded instances are walked too.
"""

import argparse
import json
import re
import shlex
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from jsonschema.validators import validator_for
from rich.console import Console

from bench import machine, pages, results_folder, workload
from bench.constraints.schema_rows import COLUMNS, Outcome, rows
from bench.constraints.timed_cursor import TimedCompiler, peak_growth
from bench.table import Table
from paceline import LLM, SpecConfig
from paceline.constraints import Json
from paceline.errors import ConstraintError
from paceline.output import Stream
from paceline.text import Tokenizer

SPECS: Final = (SpecConfig(("none",), max_draft=0), SpecConfig(("grammar", "suffix")))
BATCH: Final = 8  # schemas that share passes
SHOWN: Final = 400  # tokens of a schema in the prompt
MODEL: Final = "smollm2-135m"


class Bench:
    def __init__(self, model: str, max_tokens: int, temperature: float) -> None:
        self.llm = LLM(model, spec=SPECS[0])
        self.compiler = TimedCompiler(self.llm.tokenizer, self.llm.target.vocab_size)
        self.compiler.cursor(Json("{}"))  # builds the tokenizer's tables
        self.llm.constraints = self.compiler
        self.max_tokens, self.temperature = max_tokens, temperature

    def measure(self, records: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Figures of some schemas together."""
        outcomes = [self._compile(record) for record in records]
        usable = [
            (record, outcome)
            for record, outcome in zip(records, outcomes, strict=True)
            if outcome.refused is None and not outcome.crashed
        ]
        for record, outcome in usable:
            self._walk_instances(record, outcome)
        for spec in SPECS:
            streams = [self._stream(record, outcome, spec) for record, outcome in usable]
            for (record, outcome), stream in zip(usable, streams, strict=True):
                _read(record, outcome, stream)
        return outcomes

    def _compile(self, record: dict[str, Any]) -> Outcome:
        outcome = Outcome(record["source"], record["category"], record["id"])
        self.compiler.clock = outcome.clock
        started = time.perf_counter()
        with peak_growth() as growth:
            try:
                self.compiler.cursor(Json.of(record["schema"]))
            except ConstraintError as error:
                outcome.refused = str(error)
            except Exception as error:
                outcome.crashed = repr(error)
            outcome.compile_ms = 1000 * (time.perf_counter() - started)
            outcome.grown_mb = growth()
        return outcome

    def _stream(self, record: dict[str, Any], outcome: Outcome, spec: SpecConfig) -> Stream | None:
        self.compiler.clock = outcome.clock
        given = {"json_schema": {"name": "answer", "schema": record["schema"]}, "type": "json_schema"}
        try:
            return self.llm.stream(
                [{"role": "user", "content": prompt(record["schema"], self.llm.tokenizer)}],
                response_format=given,
                spec=spec,
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                seed=zlib.crc32(record["id"].encode()),
            )
        except Exception as error:
            outcome.crashed = repr(error)
            return None

    def _walk_instances(self, record: dict[str, Any], outcome: Outcome) -> None:
        """As json.dumps writes them. One with properties in another order than the schema's is refused."""
        self.compiler.clock = outcome.clock
        for test in record.get("tests", ()):
            text = json.dumps(test["data"], ensure_ascii=False)
            try:
                taken = self._takes(record["schema"], text)
            except ConstraintError:
                outcome.errors.append("an instance ran into a limit")
                continue
            outcome.instances[bool(test["valid"]), taken] += 1

    def _takes(self, schema: Any, text: str) -> bool:
        cursor = self.compiler.cursor(Json.of(schema))
        for token in self.llm.tokenizer.encode(text, special=False):
            if not cursor.advance(token):
                return False
        return cursor.finished or cursor.advance(next(iter(self.llm.tokenizer.eos_ids)))


def prompt(schema: Any, tokenizer: Tokenizer) -> str:
    """The start of the schema will do: what is measured is the constraint."""
    text = json.dumps(schema, ensure_ascii=False)[: 8 * SHOWN]
    shown = tokenizer.decode(tokenizer.encode(text, special=False)[:SHOWN])
    return f"Write JSON that follows this schema:\n{shown}"


def _read(record: dict[str, Any], outcome: Outcome, stream: Stream | None) -> None:
    if stream is None:
        return
    try:
        result = stream.read()
    except ConstraintError as error:
        outcome.errors.append(str(error))
        return
    except Exception as error:
        outcome.crashed = repr(error)
        return
    outcome.answers.append(result.token_ids)
    outcome.passes.append(result.passes)
    if result.finish == "stop":
        outcome.completed += 1
        outcome.valid += follows(record["schema"], result.text, outcome)
    else:
        outcome.cut += 1


def follows(schema: Any, text: str, outcome: Outcome) -> bool:
    try:
        value = json.loads(text)
        kind = validator_for(schema)
        problem = next(kind(schema).iter_errors(value), None)
    except re.error:  # a pattern that Python's own expressions cannot say
        outcome.unchecked += 1
        return False
    except Exception as error:
        outcome.wrong.append(f"{error!r}: {text[:200]}")
        return False
    if problem is not None:
        outcome.wrong.append(f"{problem.message[:200]}: {text[:200]}")
    return problem is None


def schemas(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((folder / "schemas").glob("*.jsonl")):
        yield from workload.lines(path)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = workload.data_folder()
    if folder is None:
        raise SystemExit("no schemas here: PACELINE_DATA names the folder of the data")
    chosen = list(schemas(folder))[options.skip :: options.every][: options.limit]
    bench = Bench(options.model, options.max_tokens, options.temperature)
    outcomes: list[Outcome] = []
    for at in range(0, len(chosen), BATCH):
        started = time.perf_counter()
        outcomes += bench.measure(chosen[at : at + BATCH])
        spent = time.perf_counter() - started
        print(f"{len(outcomes)}/{len(chosen)}: {spent:.1f} s", file=sys.stderr, flush=True)
    reasons = Counter(reason(o.refused) for o in outcomes if o.refused)
    return {
        "settings": {
            "schemas": len(chosen),
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        },
        "rows": rows(outcomes),
        "reasons": reasons.most_common(),
        "problems": [problem for o in outcomes for problem in o.problems()],
        "refused": {o.id: o.refused for o in outcomes if o.refused},
    }


def reason(text: str) -> str:
    """Without where it stands and what to do about it."""
    return text.partition(" (")[0].partition(": its ")[0][:100]


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    parser = argparse.ArgumentParser(prog="python -m bench schemas", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--limit", type=int, help="schemas; all by default")
    parser.add_argument("--skip", type=int, default=0, help="that many first schemas")
    parser.add_argument("--every", type=int, default=1, help="every so many schemas, for a short look at all")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    options = parser.parse_args(given)
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": shlex.join(["python", "-m", "bench", "schemas", *given]),
        **measure(options),
    }
    show(result, Console(width=None if Console().is_terminal else 220))
    if options.write:
        results_folder.write(result, f"schemas-{options.model}")
        pages.write()


def show(result: dict[str, Any], console: Console) -> None:
    console.print(Table.of(COLUMNS, result["rows"], "JSON Schemas").terminal())
    for text, count in result["reasons"][:15]:
        console.print(f"refused {count}: {text}", markup=False)
    for text in result["problems"]:
        console.print(text, markup=False)
