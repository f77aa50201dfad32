"""python -m bench prefetch-served: whole recorded runs with slow tools, with `Prefetch` and without.

A real server, real HTTP, tools that take 300 ms. The model would write other calls than those recorded, so
each answer is prescribed: `structured_outputs` has the recorded text or calls as its only choice. It is
decoded without drafts, one pass for each token: the time of an answer is the model's, its words are not. The
predictor has learned from runs of other tasks, in this process; the server reads its file as after a
restart, and learns on. Both ways have a tenant of their own, so neither finds the other's pages.
What the tools returned, in which order, and which calls had effects must be equal.
"""

import argparse
import json
import random
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, prefetch, results_folder, workload
from bench.runs.arms import WARM_UP
from bench.serve import servers
from bench.serve.http_client import Reading, Refused, events, read, take
from bench.serve.servers import CHAT, RunningServer
from bench.spread import Spread
from bench.table import Column, Table, number, spread
from paceline import hub, limits
from paceline.agent import Prefetch, PrefetchStats
from paceline.errors import TextError
from paceline.server.tool_prediction import PredictorFiles
from paceline.server.tool_prediction.conversation import Conversation, canonical, read_arguments
from paceline.server.tool_prediction.predictor import ToolCallPredictor
from paceline.text import Tokenizer
from paceline.text.tool_calls.formats import HERMES
from paceline.web.api_keys import tenant

MODEL: Final = "smollm2-135m"
RESULT: Final = "prefetched"
TOOL_S: Final = 0.3
USERS: Final = {True: "agent", False: "without"}
ROOM: Final = 1024  # tokens of an answer, which may be cut into more than the fewest
Record = dict[str, Any]
Call = tuple[str, str]  # a name and the arguments' JSON

COLUMNS: Final = (
    Column("runs", "set"),
    Column("number", "runs"),
    Column("answers", "answers"),
    Column("calls", "calls"),
    Column("used ahead of time", "used"),
    Column("started in vain", "dropped"),
    Column("an answer, ms", lambda r: number(r["answer_ms"], 0)),
    Column("without, s", lambda r: number(r["without_s"], 1)),
    Column("with, s", lambda r: number(r["with_s"], 1)),
    Column("shorter", lambda r: f"{100 * r['shorter']:.0f} %"),
    Column("of a run", lambda r: spread(r["single"], 2)),
    Column("results and effects", lambda r: "equal" if r["equal"] else "differ"),
)


@dataclass
class Run:
    """One recorded run as one way went through it."""

    seconds: float = 0.0
    answers_s: list[float] = field(default_factory=list)
    calls: int = 0
    results: list[tuple[Call, str]] = field(default_factory=list)
    effects: list[Call] = field(default_factory=list)  # calls of tools that are not safe, as they ran
    stats: PrefetchStats = field(default_factory=PrefetchStats)


def prescribed(message: Mapping[str, Any]) -> str:
    """The text that an answer must have."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    text = message.get("content") or ""
    before, between, after = HERMES.call
    written = [
        f"{HERMES.begin}{before}{f['name']}{between}{f['arguments']}{after}{HERMES.end}" for f in calls
    ]
    return text if not calls else HERMES.between.join(written)


class Tools:
    """Those of one run: each answers as it did when the run was recorded, after TOOL_S."""

    def __init__(self, record: Record, run: Run) -> None:
        self._results: dict[Call, list[str]] = {}
        self._run = run
        by_id = {m["tool_call_id"]: m.get("content") or "" for m in record["messages"] if m["role"] == "tool"}
        for message in record["messages"]:
            for call in message.get("tool_calls") or ():
                function = call["function"]
                key = (function["name"], canonical(json.loads(function["arguments"])))
                self._results.setdefault(key, []).append(str(by_id.get(call["id"], "")))
        names = [tool["function"]["name"] for tool in record["tools"]]
        self.safe = [name for name in names if prefetch.reads(name)]
        self.functions = {name: partial(self._answer, name) for name in names}

    def _answer(self, tool_name: str, /, **arguments: Any) -> str:
        """The recorded result; of a call that no answer has, nothing."""
        key = (tool_name, canonical(arguments))
        if tool_name not in self.safe:
            self._run.effects.append(key)
        time.sleep(TOOL_S)
        return (self._results.get(key) or [""])[0]


def replay(port: int, model: str, record: Record, ahead: bool) -> Run:
    run = Run()
    tools = Tools(record, run)
    begun = time.perf_counter()
    with Prefetch(tools.functions, tools.safe) as client:
        for index, message in enumerate(record["messages"]):
            if message["role"] != "assistant" or not (text := prescribed(message)):
                continue
            body = request(model, record, index, text, USERS[ahead])
            body |= client.extra_body if ahead else {}
            reading = _answer(client, port, body)
            run.answers_s.append(reading.end)
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            wanted = [(f["name"], canonical(json.loads(f["arguments"]))) for f in functions]
            if [(name, canonical(read_arguments(given))) for name, given in reading.calls.values()] != wanted:
                raise Refused(500, f"another answer than the one prescribed: {reading}")
            for name, given in wanted:
                run.calls += 1
                run.results.append(((name, given), client.run(name, given)))
        run.stats = client.stats
    run.seconds = time.perf_counter() - begun
    return run


def request(model: str, record: Record, index: int, text: str, user: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": record["messages"][:index],
        "tools": record["tools"],
        "structured_outputs": {"choice": [text]},
        "speculative_config": {"disabled": True},
        "user": user,
        "max_tokens": ROOM,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _answer(client: Prefetch, port: int, body: Mapping[str, Any]) -> Reading:
    reading, begun = Reading(), time.perf_counter()
    for event in client.watch(events(port, CHAT, body)):
        take(reading, event, time.perf_counter() - begun)
    reading.end = time.perf_counter() - begun
    return reading


def chosen(
    name: str, tokenizer: Tokenizer, count: int, max_prompt: int, seed: int
) -> tuple[list[Record], list[Record]]:
    """Runs to replay, and those of other tasks, which are the history; both of one tenant."""
    folder = workload.data_folder()
    if folder is None:
        raise SystemExit("no data: set PACELINE_DATA to the folder that holds traces/")
    records = [
        r for file in prefetch.SETS[name] for r in workload.lines(folder / "traces" / f"{file}.jsonl.gz")
    ]
    owners: dict[str, list[Record]] = {}
    for record in records:
        owners.setdefault(prefetch.tenant(record), []).append(record)
    mine = max(owners.values(), key=len)
    shuffled = random.Random(seed).sample(mine, len(mine))
    fitting = (r for r in shuffled if _fits(r, tokenizer, max_prompt))
    picked: list[Record] = []
    for record in fitting:
        if all(record["group"] != other["group"] for other in picked):
            picked.append(record)
        if len(picked) == count:
            break
    groups = {str(record["group"]) for record in picked}
    return picked, [record for record in mine if str(record["group"]) not in groups]


def _fits(record: Record, tokenizer: Tokenizer, max_prompt: int) -> bool:
    """Every answer can be prescribed, with one call at most, and the prompts are short enough."""
    try:
        if len(tokenizer.encode_chat(record["messages"], record["tools"])) > max_prompt:
            return False
    except TextError:
        return False
    answers = [m for m in record["messages"] if m["role"] == "assistant"]
    texts = [prescribed(m) for m in answers]
    if any(len(m.get("tool_calls") or ()) > 1 for m in answers):
        return False
    if any(len(tokenizer.encode(text)) > ROOM // 4 or "<|" in text for text in texts):
        return False
    calls = [call["function"] for m in answers for call in m.get("tool_calls") or ()]
    offered = {tool["function"]["name"] for tool in record["tools"]}
    return bool(calls) and all(
        f["name"] in offered and isinstance(json.loads(f["arguments"]), dict) for f in calls
    )


def trained(history: Sequence[Record]) -> ToolCallPredictor:
    predictor = ToolCallPredictor()
    for record in history:
        tools = {
            t["function"]["name"]: t["function"]
            for t in record["tools"]
            if prefetch.reads(t["function"]["name"])
        }
        for messages, calls in prefetch.turns(record):
            predictor.learn(predictor.predict(Conversation(messages), tools), calls)
    return predictor


def measure(
    name: str, options: argparse.Namespace, tokenizer: Tokenizer, report: Callable[[str], None]
) -> dict[str, Any]:
    records, history = chosen(name, tokenizer, options.runs, options.max_prompt, options.seed)
    if not records:
        raise SystemExit(f"{name}: no run is short enough: raise --max-prompt")
    pairs: list[dict[bool, Run]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = PredictorFiles(Path(folder), options.model)
        files.write(tenant(None, USERS[True]), trained(history))
        served = servers.paceline(options.model, options.threads, 2, options=["--cache-dir", folder])
        try:
            _prepare(served, options.model, records[0])
            for place, record in enumerate(records):
                order = (True, False) if place % 2 else (False, True)
                try:
                    pair = {ahead: replay(served.port, options.model, record, ahead) for ahead in order}
                except Refused as problem:
                    report(f"left out: {record['id']}: {problem}")
                    continue
                pairs.append(pair)
                with_s, without_s = pairs[-1][True].seconds, pairs[-1][False].seconds
                report(f"{name} {record['id']}: {without_s:.2f} s without, {with_s:.2f} s with")
        finally:
            served.close()
    if not pairs:
        raise SystemExit(f"{name}: no run was answered as prescribed")
    return row(name, len(history), pairs)


def _prepare(served: RunningServer, model: str, record: Record) -> None:
    """Both tenants have the system prompt and the tools in the cache, as after an agent's first run."""
    read(served.port, CHAT, {**WARM_UP, "user": "warm-up"})
    for user in USERS.values():
        body = request(model, record, 1, "Hello.", user)
        read(served.port, CHAT, body | {"messages": record["messages"][:2]})


def row(name: str, history: int, pairs: Sequence[Mapping[bool, Run]]) -> dict[str, Any]:
    ahead, plain = [pair[True] for pair in pairs], [pair[False] for pair in pairs]
    with_s, without_s = (sum(run.seconds for run in runs) for runs in (ahead, plain))
    answers = [seconds for run in plain for seconds in run.answers_s]
    return {
        "set": name,
        "history": history,
        "runs": len(pairs),
        "answers": len(answers),
        "calls": sum(run.calls for run in ahead),
        "used": sum(run.stats.used for run in ahead),
        "dropped": sum(run.stats.dropped for run in ahead),
        "answer_ms": 1000 * sum(answers) / len(answers),
        "with_s": with_s,
        "without_s": without_s,
        "shorter": 1 - with_s / without_s,
        "single": asdict(Spread.of([a.seconds / p.seconds for a, p in zip(ahead, plain, strict=True)])),
        "equal": all(
            a.results == p.results and a.effects == p.effects for a, p in zip(ahead, plain, strict=True)
        ),
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench prefetch-served", description=__doc__)
    made.add_argument("--model", default=MODEL)
    made.add_argument(
        "--sets", default=",".join(prefetch.SETS), help="separated by commas; results of others are kept"
    )
    made.add_argument("--runs", type=int, default=4, help="of each set")
    made.add_argument("--max-prompt", type=int, default=7000, help="tokens of a whole run")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=limits.cores())
    made.add_argument("--write", action="store_true", help="write bench/results and docs/agents.md")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    options = parser().parse_args(given)
    names = options.sets.split(",")
    if unknown := [name for name in names if name not in prefetch.SETS]:
        raise SystemExit(f"--sets: {unknown[0]!r} is none of {', '.join(prefetch.SETS)}")
    servers.end_with_this_process()
    tokenizer = Tokenizer.load(hub.resolve(options.model))
    rows = [measure(name, options, tokenizer, print) for name in names]
    Console(width=200).print(Table.of(COLUMNS, rows, f"tools of {1000 * TOOL_S:.0f} ms").terminal())
    if options.write:
        kept = [one for r in results_folder.read(RESULT) for one in r["rows"] if one["set"] not in names]
        result = {
            "machine": {"model": options.model, **machine.facts()},
            "command": shlex.join(["python", "-m", "bench", "prefetch-served", *given]),
            "rows": [*kept, *rows],
        }
        results_folder.write(result, f"{RESULT}-{options.model}")
        pages.write()
    if not all(one["equal"] for one in rows):
        raise SystemExit("results or effects differ")
