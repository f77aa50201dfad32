"""python -m bench prefetch: tool calls of recorded agents, predicted before they are written.

Recorded runs are replayed in order. For each answer the predictor is asked twice: before anything of it
is written, and once the name of a call is. It knows the conversation so far, the offered tools and
earlier runs of the same tenant: the same agent, domain and model. Runs of one task, or of one customer,
are never history for one another, unless --repeats. A prediction is right if the answer has exactly that
call, by its JSON; every other one is wrong, also where the answer has no call at all. Only tools that
read may be predicted. "Results kept": a client with `keep_s` runs a call once, however often it is predicted
until a tool that is not safe runs; it is right if an answer has it by then.

The time saved is computed, not measured: an answer takes a given time, half of it after the name of its
call, and every tool takes 300 ms. The client starts a predicted call at once, and waits for the rest of
it. For a real server and real tools: examples/agent_prefetch.py.
"""

import argparse
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import pages, workload
from bench.table import Column, Table
from paceline.server.tool_prediction.conversation import Conversation, canonical, read_arguments
from paceline.server.tool_prediction.predictor import ToolCallPredictor
from paceline.server.tool_prediction.tool_predictions import MAX_CALLS, MIN_PROBABILITY

RESULT: Final = "prefetch-recorded"
SETS: Final = {
    "tau-bench airline": ("tau_bench_airline_gpt4o",),
    "tau-bench retail": ("tau_bench_retail_fork", "community_tau_bench_retail_grok3"),
    "tau2-bench": ("tau2_bench", "community_tau2"),
    "BFCL multi-turn": ("bfcl_multi_turn",),
}
READS: Final = (
    "get_",
    "find_",
    "list_",
    "search_",
    "check_",
    "view_",
    "estimate_",
    "verify_",
    "retrieve_",
    "display",
)
ALSO_READS: Final = frozenset(
    (
        *(
            "calculate",
            "can_send_mms",
            "run_speed_test",
            "compute_exchange_rate",
            "gallon_to_liter",
            "liter_to_gallon",
        ),
        *("ls", "pwd", "cat", "wc", "sort", "grep", "find", "tail", "head", "diff", "du"),
        *("mean", "logarithm", "standard_deviation"),
    )
)
TOOL_S: Final = 0.3
ANSWER_S: Final = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)  # of an answer that calls a tool
NAME_SHARE: Final = 0.5  # of an answer's time, until the name of its call is written
BINS: Final = 10
CUSTOMERS_OF: Final = ("airline", "retail")
_USER: Final = re.compile(r'"user_id": ?"(\w+)"')


def reads(name: str) -> bool:
    """A tool without effects, as its developer would mark it."""
    return name.startswith(READS) or name in ALSO_READS


@dataclass(slots=True)
class Score:
    """Counts over the answers of a data set."""

    runs: int = 0
    answers: int = 0
    calls: int = 0
    safe: int = 0  # calls of tools that may be predicted
    literal: int = 0  # whose arguments all stand in the conversation, or were given to the tool before
    early: int = 0  # safe calls predicted before the answer
    early_wrong: int = 0
    named: int = 0  # further ones predicted once the name was written
    named_wrong: int = 0
    kept: int = 0  # calls whose tool has run for an earlier answer or this one, if results are kept
    kept_wrong: int = 0
    predict_s: list[float] = field(default_factory=list)
    learn_s: float = 0.0
    bins: list[list[float]] = field(default_factory=lambda: [[0, 0.0, 0] for _ in range(BINS)])

    def row(self, name: str) -> dict[str, Any]:
        both, wrong = self.early + self.named, self.early_wrong + self.named_wrong
        times = sorted(self.predict_s)
        return {
            "set": name,
            "runs": self.runs,
            "answers": self.answers,
            "calls": self.calls,
            "safe": self.safe,
            "literal": self.literal / max(1, self.safe),
            "early": self.early / max(1, self.safe),
            "early_wrong": self.early_wrong / max(1, self.early),
            "both": both / max(1, self.safe),
            "both_of_all": both / max(1, self.calls),
            "both_wrong": wrong / max(1, both),
            "kept": self.kept / max(1, self.safe),
            "kept_wrong": self.kept_wrong / max(1, self.kept),
            "ms": 1000 * sum(times) / max(1, len(times)),
            "ms_p99": 1000 * times[int(0.99 * (len(times) - 1))] if times else 0.0,
            "learn_ms": 1000 * self.learn_s / max(1, self.answers),
            "calibration": self.calibration_error(),
            "saved": {str(s): self.saved(s) for s in ANSWER_S},
        }

    def calibration_error(self) -> float:
        """Expected calibration error over all candidates that have a probability of a tenth or more."""
        total = sum(n for n, _, _ in self.bins[1:])
        return sum(abs(said - right) for _, said, right in self.bins[1:]) / max(1.0, total)

    def saved(self, answer_s: float) -> float:
        """Share of the time of all calls and the answers that hold them."""
        early = self.early * min(TOOL_S, answer_s)
        named = self.named * min(TOOL_S, answer_s * (1 - NAME_SHARE))
        return (early + named) / max(1e-9, self.calls * (answer_s + TOOL_S))


Record = dict[str, Any]
Key = tuple[str, str]  # a call: its name and the JSON of its arguments


def tenant(record: Record) -> str:
    domain = "" if record["source"].startswith("bfcl") else record["domain"]
    return f"{record['source']} {domain} {record['model']}"


def in_order(records: Iterable[Record], repeats: bool) -> list[list[Record]]:
    """Batches, each of which is history for those after it. repeats: every run is."""
    if repeats:
        return [[record] for record in records]
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((tenant(record), group(record)), []).append(record)
    return list(groups.values())


def group(record: Record) -> str:
    """The customer whom a shop or an airline serves in this run; else as the data have it: the task.

    By the run itself: one source of tau2-bench has other task numbers than its labels were made for.
    """
    if record["domain"] in CUSTOMERS_OF:
        arguments = (dict(given) for _, calls in turns(record) for _, given in calls)
        named: list[str] = [given["user_id"] for given in arguments if isinstance(given.get("user_id"), str)]
        results = (m.get("content") or "" for m in record["messages"] if m["role"] == "tool")
        named += [found for text in results for found in _USER.findall(text)]
        if named:
            return Counter(named).most_common(1)[0][0]
    return str(record["group"])


def turns(record: Record) -> Iterator[tuple[Sequence[Any], list[tuple[str, dict[str, Any]]]]]:
    """Each answer's conversation before it, and its calls."""
    for i, message in enumerate(record["messages"]):
        if message["role"] == "assistant":
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [(f["name"], read_arguments(f["arguments"]) or {}) for f in functions]
            yield record["messages"][:i], calls


def literal(chat: Conversation, arguments: dict[str, Any], earlier: dict[str, set[str]], name: str) -> bool:
    """Each value stands somewhere in the conversation, or the tool had it before."""
    texts = {text for source in chat.sources.values() for text in source.values}
    known = (
        canonical(value) in texts
        or canonical(str(value)) in texts
        or canonical(value) in earlier[f"{name} {argument}"]
        for argument, value in arguments.items()
    )
    return all(known)


def evaluate(records: Iterable[Record], repeats: bool, min_probability: float) -> Score:
    score = Score()
    predictors: dict[str, ToolCallPredictor] = defaultdict(ToolCallPredictor)
    earlier: dict[str, set[str]] = defaultdict(set)  # values by tenant, tool and argument
    for batch in in_order(records, repeats):
        learned = []
        for record in batch:
            score.runs += 1
            ahead = set[Key]()
            tools = {
                t["function"]["name"]: t["function"] for t in record["tools"] if reads(t["function"]["name"])
            }
            for messages, calls in turns(record):
                predictor = predictors[tenant(record)]
                begun = time.perf_counter()
                forecast = predictor.predict(Conversation(messages), tools)
                score.predict_s.append(time.perf_counter() - begun)
                predicted = _count(score, forecast, calls, min_probability)
                ahead = _kept(score, ahead | predicted, calls, tools)
                score.literal += sum(
                    literal(forecast.chat, given, earlier, f"{tenant(record)} {name}")
                    for name, given in calls
                    if name in tools
                )
                learned.append((tenant(record), forecast, calls))
            score.kept_wrong += len(ahead)
        for owner, forecast, calls in learned:
            begun = time.perf_counter()
            predictors[owner].learn(forecast, calls)
            score.learn_s += time.perf_counter() - begun
            for name, given in calls:
                for argument, value in given.items():
                    earlier[f"{owner} {name} {argument}"].add(canonical(value))
    return score


def _count(
    score: Score, forecast: Any, calls: list[tuple[str, dict[str, Any]]], min_probability: float
) -> set[Key]:
    """Gives the predicted calls."""
    score.answers += 1
    score.calls += len(calls)
    safe = [(name, canonical(given)) for name, given in calls if name in forecast.tools]
    score.safe += len(safe)
    written = set(safe)
    for call in forecast.candidates:
        one = score.bins[min(BINS - 1, int(BINS * call.probability))]
        one[0], one[1] = one[0] + 1, one[1] + call.probability
        one[2] += (call.name, call.text) in written
    early = {(c.name, canonical(c.arguments)) for c in forecast.calls(min_probability, MAX_CALLS)}
    named = {
        (c.name, canonical(c.arguments))
        for name in dict.fromkeys(name for name, _ in safe)
        for c in forecast.given_name(name, min_probability, MAX_CALLS)
    } - early
    score.early += len(early & written)
    score.early_wrong += len(early - written)
    score.named += len(named & written)
    score.named_wrong += len(named - written)
    return early | named


def _kept(
    score: Score, ahead: set[Key], calls: list[tuple[str, dict[str, Any]]], safe: Mapping[str, Any]
) -> set[Key]:
    """Counts for a client that keeps results until a tool that is not safe runs; gives those it still has."""
    for name, given in calls:
        if name not in safe:
            score.kept_wrong += len(ahead)
            ahead = set()
        elif (key := (name, canonical(given))) in ahead:
            score.kept += 1
            ahead = ahead - {key}
    return ahead


def _saved(answer_s: float, row: Any) -> str:
    return f"{100 * row['saved'][str(answer_s)]:.0f} %"


def percent(key: str) -> Any:
    return lambda row: f"{100 * row[key]:.0f} %"


COLUMNS: Final = (
    Column("runs", "set"),
    Column("number", "runs"),
    Column("calls", "calls"),
    Column("of tools that read", "safe"),
    Column("arguments known", percent("literal")),
    Column("predicted before the answer", percent("early")),
    Column("wrong for a right one", lambda r: f"{r['early_wrong']:.2f}"),
    Column("with the name written", percent("both")),
    Column("wrong for a right one, both", lambda r: f"{r['both_wrong']:.2f}"),
    Column("wrong for a right one, results kept", lambda r: f"{r['kept_wrong']:.2f}"),
    Column("of all calls", percent("both_of_all")),
    Column("calibration error", lambda r: f"{r['calibration']:.3f}"),
    Column("ms, mean / p99", lambda r: f"{r['ms']:.1f} / {r['ms_p99']:.1f}"),
)
SHORT: Final = tuple(  # for docs/agents.md
    column for column in COLUMNS if column.title not in ("arguments known", "of all calls", "ms, mean / p99")
)
SAVED: Final = (
    Column("runs", "set"),
    *(Column(f"answer {s:g} s", partial(_saved, s)) for s in ANSWER_S),
)


def about(result: Mapping[str, Any]) -> str:
    facts, repeats = result["machine"], "--repeats" in result["command"]
    history = "all earlier runs" if repeats else "earlier runs of other tasks and other customers"
    return (
        f"`{result['command']}`, {facts['date']}, commit {facts['commit']}: recorded runs replayed in order, "
        f"with {history} of the same agent as history. Right: exactly a call of the answer, by its JSON."
    )


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    return [
        Table.of(COLUMNS, rows, "Predicted tool calls"),
        Table.of(
            SAVED, rows, f"Time saved of calls and their answers, tools of {TOOL_S * 1000:.0f} ms (computed)"
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench prefetch", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", action="store_true", help="runs of one task are history for one another")
    parser.add_argument("--min-probability", type=float, default=MIN_PROBABILITY)
    parser.add_argument("--limit", type=int, default=None, help="runs of each file")
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results")
    given = sys.argv[2:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    folder = workload.data_folder()
    if folder is None:
        raise SystemExit("no data: set PACELINE_DATA to the folder that holds traces/")
    rows = []
    for name, files in SETS.items():
        print(name, file=sys.stderr, flush=True)
        records = [
            record
            for file in files
            for record in _records(folder / "traces" / f"{file}.jsonl.gz", options.limit)
        ]
        rows.append(evaluate(records, options.repeats, options.min_probability).row(name))
    for table in tables(rows):
        Console(width=200).print(table.terminal())
    if options.write:
        pages.keep(RESULT, "prefetch", given, rows=rows)


def _records(path: Path, limit: int | None) -> list[Record]:
    return list(workload.lines(path))[:limit]
