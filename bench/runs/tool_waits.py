"""python -m bench prefetch-served: recorded agent runs over HTTP with slow tools, with prefetching or not.

A real server reads every prompt and writes every answer, token by token. The answers are the recorded ones
(recorded_answers.py), so that both ways take the same turns; drafts come from `suffix` and `ngram`, which do
not know the answer, and not from `grammar`, which here would. Tools answer after 300 ms with the recorded
result, in plain runs one call after another. With prefetching, `paceline.agent.Prefetch` runs calls of tools
that read ahead of time: predicted ones, and those of one answer side by side. A third way keeps the results
for later answers (`keep_s`), until a tool that changes something runs.

A tenant is an agent, domain and model of a data set. Its predictor has learned from all its runs but the last
groups, of which the replayed runs are, and learns nothing from these: runs of one task or one customer are in
one group. System prompts and tools have been read before. Users answer at once.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from bench import pages, prefetch, workload
from bench.runs.arms import WARM_UP
from bench.runs.conversations import GREETING, Message
from bench.runs.effects import PREFILL
from bench.serve import servers
from bench.serve.http_client import Reading, Refused, events, post, read, take
from bench.serve.servers import CHAT
from bench.table import Column, Table
from paceline import hub, limits
from paceline.agent import Prefetch
from paceline.errors import TextError
from paceline.server.tool_prediction.conversation import Conversation, canonical, read_arguments
from paceline.server.tool_prediction.predictor import ToolCallPredictor
from paceline.server.tool_prediction.predictor_files import PredictorFiles
from paceline.text import Tokenizer
from paceline.text.tool_calls import ToolCall, ToolFormat, render_calls
from paceline.web.api_keys import tenant as tenant_of

MODEL: Final = "smollm2-135m"
RESULT: Final = "tool_waits"
SERVER: Final = "bench.runs.recorded_answers"
RUNS: Final = 3  # of each data set
HELD_BACK: Final = 3  # last groups of a tenant, which its predictor does not know
MAX_PROMPT: Final = 8000  # tokens
ROOM: Final = 8  # tokens beyond the recorded answer's
DRAFTERS: Final = ("suffix", "ngram")
KEEP_S: Final = 60.0  # where results are kept: longer than the runs take
PLAIN, AHEAD, KEPT = "plain", "prefetching", "prefetching, results kept"
WAYS: Final[Mapping[str, Mapping[str, float]]] = {PLAIN: {}, AHEAD: {}, KEPT: {"keep_s": KEEP_S}}
SUMMED: Final = ("seconds", "tool_s", "used", "wrong")
Record = dict[str, Any]
Key = tuple[str, str]  # a call: its name and the JSON of its arguments


@dataclass(frozen=True)
class Step:
    """One answer of a recorded run."""

    messages: Sequence[Message]  # before it
    content: str  # for the user
    text: str  # all of it, in the model's markup
    tokens: int
    calls: tuple[tuple[str, str, str], ...]  # name, arguments and result of each


@dataclass(frozen=True)
class RecordedRun:
    set: str
    tenant: str
    id: str
    tools: Sequence[Mapping[str, Any]] = field(repr=False)
    steps: tuple[Step, ...] = field(repr=False)

    @property
    def head(self) -> list[Message]:
        """What the tenant's runs begin with."""
        first = self.steps[0].messages[:1]
        return list(first) if first and first[0]["role"] == "system" else [GREETING]


def steps(record: Record, tokenizer: Tokenizer, max_prompt: int) -> tuple[Step, ...]:
    """Of one run; none where the template refuses a message, an answer is empty or the run is too long."""
    messages, made = record["messages"], []
    results = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not i:
            continue
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        content, text = message.get("content") or "", _written(message, tokenizer)
        given = tuple((f["name"], f["arguments"], results.get(id) or "") for id, f in calls)
        if not text:
            return ()
        tokens = len(tokenizer.encode(text, bos=False))
        made.append(Step(messages[:i], content, text, tokens, given))
    try:
        longest = len(tokenizer.encode_chat(made[-1].messages, record["tools"])) if made else 0
    except TextError:
        return ()
    return tuple(made) if longest <= max_prompt else ()


def _written(message: Message, tokenizer: Tokenizer) -> str:
    """An answer in the model's markup."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return (message.get("content") or "") + _markup(functions, tokenizer.tool_format)


def _markup(functions: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    calls = [ToolCall(f["name"], read_arguments(f["arguments"]) or {}) for f in functions]
    return render_calls(calls, form) if calls else ""


def learned(batches: Sequence[Sequence[Record]]) -> ToolCallPredictor:
    """A predictor that has seen these runs, in their order, as a server has."""
    predictor = ToolCallPredictor()
    for batch in batches:
        forecasts = []
        for record in batch:
            tools = {name: function for name, function in _functions(record) if prefetch.reads(name)}
            for messages, calls in prefetch.turns(record):
                forecasts.append((predictor.predict(Conversation(messages), tools), calls))
        for forecast, calls in forecasts:
            predictor.learn(forecast, calls)
    return predictor


def _functions(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((tool["function"]["name"], tool["function"]) for tool in record["tools"])


def choose(
    name: str, records: Sequence[Record], tokenizer: Tokenizer, count: int, max_prompt: int
) -> tuple[list[RecordedRun], dict[str, list[list[Record]]]]:
    """The runs to replay, the tenants in turn, and the history of each tenant."""
    tenants: dict[str, list[list[Record]]] = defaultdict(list)
    for batch in prefetch.in_order(records, repeats=False):
        tenants[prefetch.tenant(batch[0])].append(batch)
    piles = [
        _fitting(name, tenant, tenants[tenant][-HELD_BACK:], tokenizer, max_prompt) for tenant in tenants
    ]
    mixed = (run for run in chain.from_iterable(zip_longest(*piles)) if run is not None)
    runs = list(islice(mixed, count))
    return runs, {run.tenant: tenants[run.tenant][:-HELD_BACK] for run in runs}


def _fitting(
    name: str, tenant: str, groups: Sequence[Sequence[Record]], tokenizer: Tokenizer, max_prompt: int
) -> Iterator[RecordedRun]:
    """One run of each group."""
    for group in groups:
        for record in group:
            if made := steps(record, tokenizer, max_prompt):
                yield RecordedRun(name, tenant, str(record["id"]), record["tools"], made)
                break


@dataclass(frozen=True, slots=True)
class Amounts:
    """What all runs of a data set consist of."""

    tokens: int  # of answers
    calls: int
    safe: int

    @classmethod
    def of(cls, records: Sequence[Record], tokenizer: Tokenizer) -> "Amounts":
        answers = [m for record in records for m in record["messages"][1:] if m["role"] == "assistant"]
        names = [call["function"]["name"] for m in answers for call in m.get("tool_calls") or ()]
        tokens = (len(tokenizer.encode(_written(answer, tokenizer), bos=False)) for answer in answers)
        return cls(sum(tokens), len(names), sum(map(prefetch.reads, names)))


class RecordedTools:
    """Tools that take their time and answer as they did when the run was recorded."""

    def __init__(self, run: RecordedRun, seconds: float) -> None:
        self._run, self._seconds = run, seconds
        self.step = 0  # of the run, which is being answered
        self.effects: list[Key] = []  # calls of tools that change something, as they ran

    def functions(self) -> dict[str, Any]:
        return {
            tool["function"]["name"]: self._function(tool["function"]["name"]) for tool in self._run.tools
        }

    def _function(self, name: str) -> Any:
        def call(**arguments: Any) -> str:
            found = self._result((name, canonical(arguments)))
            if not prefetch.reads(name):
                self.effects.append((name, canonical(arguments)))
            time.sleep(self._seconds)
            return found

        return call

    def _result(self, key: Key) -> str:
        """Of that call where it stands next in the recording."""
        for step in self._run.steps[self.step :]:
            for name, arguments, result in step.calls:
                if key == (name, canonical(read_arguments(arguments) or {})):
                    return result
        return "not recorded"


@dataclass
class Replay:
    """A run as it went one way."""

    seconds: float = 0.0
    tool_s: float = 0.0  # that the client waited for tools
    answer_s: list[float] = field(default_factory=list)  # of answers that have calls
    calls: int = 0
    safe: int = 0
    used: int = 0  # calls whose tool had run ahead of time
    wrong: int = 0
    texts: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    effects: list[Key] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)

    def add(self, begun: float, what: str) -> None:
        self.timeline.append(f"  {1000 * (time.perf_counter() - begun):6.0f} ms  {what[:140]}")


class Client:
    """An agent that replays runs against one server."""

    def __init__(self, port: int, model: str, tool_s: float) -> None:
        self._port, self._model, self._tool_s = port, model, tool_s

    def read_head(self, run: RecordedRun, way: str) -> None:
        """Nothing is written to the disk meanwhile."""
        whose = {"user": user(run.tenant, way), "remember": False}
        body = {"model": self._model, "messages": run.head, "tools": run.tools, **whose}
        status, text = post(self._port, PREFILL, body)
        if status != 200:
            raise Refused(status, text)

    def replay(self, run: RecordedRun, way: str) -> Replay:
        tools, done = RecordedTools(run, self._tool_s), Replay()
        functions = tools.functions()
        safe = [name for name in functions if prefetch.reads(name)]
        with Prefetch(functions, safe, **WAYS[way]) as ahead:  # type: ignore[arg-type]
            begun = time.perf_counter()
            for number, step in enumerate(run.steps):
                tools.step = number
                self._answer(run, step, way, ahead, done, begun)
                for name, arguments, _ in step.calls:
                    self._run_tool(name, arguments, way, ahead, functions, done, begun)
                    done.safe += name in safe
            done.seconds = time.perf_counter() - begun
            ahead.drop()
            done.used, done.wrong = ahead.stats.used, ahead.stats.dropped
        done.effects = tools.effects
        return done

    def _answer(
        self, run: RecordedRun, step: Step, way: str, ahead: Prefetch, done: Replay, begun: float
    ) -> None:
        body = {
            "model": self._model,
            "messages": list(step.messages),
            "tools": list(run.tools),
            "user": user(run.tenant, way),
            "remember": False,
            "temperature": 0.0,
            "max_tokens": step.tokens + ROOM,
            "structured_outputs": {"choice": [step.text]},
            "speculative_config": {"drafters": list(DRAFTERS)},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reading, asked = Reading(), time.perf_counter()
        stream = events(self._port, CHAT, body | ({} if way == PLAIN else ahead.extra_body))
        for event in stream if way == PLAIN else ahead.watch(stream):
            for call in event.get("predicted_tool_calls") or ():
                function = call["function"]
                done.add(begun, f"ahead   {function['name']}({function['arguments']}), {call['probability']}")
            take(reading, event, time.perf_counter() - asked)
        if step.calls:
            done.answer_s.append(time.perf_counter() - asked)
        else:
            done.add(begun, f"answer  {reading.text!r}")
        calls = [(name, canonical(read_arguments(given) or {})) for name, given in reading.calls.values()]
        done.texts.append(json.dumps([reading.text, calls]))

    def _run_tool(
        self,
        name: str,
        arguments: str,
        way: str,
        ahead: Prefetch,
        functions: Mapping[str, Any],
        done: Replay,
        begun: float,
    ) -> None:
        done.add(begun, f"call    {name}({arguments})")
        asked, used = time.perf_counter(), ahead.stats.used
        given = read_arguments(arguments) or {}
        result = functions[name](**given) if way == PLAIN else ahead.run(name, given)
        done.tool_s += time.perf_counter() - asked
        done.calls += 1
        done.results.append(result)
        done.add(begun, f"result  {result[:60]!r}{', prefetched' if ahead.stats.used > used else ''}")


def user(tenant: str, way: str) -> str:
    """Neither way finds the other's pages."""
    return f"{tenant}, {way}"


def expected(run: RecordedRun) -> tuple[list[str], list[str]]:
    """Texts and results as they were recorded."""
    texts, results = [], []
    for step in run.steps:
        calls = [(name, canonical(read_arguments(given) or {})) for name, given, _ in step.calls]
        texts.append(json.dumps([step.content, calls]))
        results += [result for _, _, result in step.calls]
    return texts, results


def row(run: RecordedRun, ways: Mapping[str, Replay]) -> dict[str, Any]:
    plain = ways[PLAIN]
    known = expected(run)
    same = all((one.texts, one.results) == known for one in ways.values())
    return {
        "set": run.set,
        "run": run.id,
        "answers": len(run.steps),
        "tokens": sum(step.tokens for step in run.steps),
        "calls": plain.calls,
        "safe": plain.safe,
        "answer_s": plain.answer_s,
        "ways": {way: {key: getattr(one, key) for key in SUMMED} for way, one in ways.items()},
        "same": same and all(one.effects == plain.effects for one in ways.values()),
    }


def totals(rows: Sequence[Mapping[str, Any]], whole: Mapping[str, Amounts]) -> list[dict[str, Any]]:
    """One of each data set, and one of all. whole: all runs of each, of which these are some."""
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for one in rows:
        sets.setdefault(one["set"], []).append(one)
    each = [{**_total(name, some), **_whole(some, whole[name])} for name, some in sets.items()]
    both = {key: sum(one[key] for one in each) for key in ("whole_s", "whole_safe_s")}
    return [*each, {**_total("all", rows), **both}]


def _whole(rows: Sequence[Mapping[str, Any]], amounts: Amounts) -> dict[str, float]:
    """Seconds of all runs of a data set, if their tokens and calls take as long as those of these runs."""
    plain = _total_of(PLAIN, rows)
    tool_s = plain["tool_s"] / max(1, sum(row["calls"] for row in rows))
    token_s = (plain["seconds"] - plain["tool_s"]) / sum(row["tokens"] for row in rows)
    return {
        "whole_s": amounts.tokens * token_s + amounts.calls * tool_s,
        "whole_safe_s": amounts.safe * tool_s,
    }


def _total(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answers = sorted(chain.from_iterable(row["answer_s"] for row in rows))
    return {
        "set": name,
        "runs": len(rows),
        **{key: sum(row[key] for row in rows) for key in ("answers", "calls", "safe", "same")},
        "answer_ms": 1000 * median(answers) if answers else 0.0,
        "ways": {way: _total_of(way, rows) for way in WAYS},
    }


def _total_of(way: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums = {key: sum(row["ways"][way][key] for row in rows) for key in SUMMED}
    plain_s = sum(row["ways"][PLAIN]["seconds"] for row in rows)
    shorter = [1 - row["ways"][way]["seconds"] / row["ways"][PLAIN]["seconds"] for row in rows]
    spread = {"least": min(shorter), "most": max(shorter)}
    return {**sums, "shorter": 1 - sums["seconds"] / plain_s, **spread}


def _shorter(way: str) -> Callable[[Any], str]:
    def text(row: Any) -> str:
        shorter, least, most = (100 * row["ways"][way][key] for key in ("shorter", "least", "most"))
        return f"{shorter:.0f} % ({least:.0f} to {most:.0f})"

    return text


def _of(way: str, form: str) -> Callable[[Any], str]:
    return lambda row: form.format(**row["ways"][way])


def most(row: Mapping[str, Any]) -> float:
    """The share of plain runs in which tools that read are waited for: nobody can save more."""
    plain = row["ways"][PLAIN]
    return float(plain["tool_s"] * row["safe"] / max(1, row["calls"]) / plain["seconds"])


COLUMNS: Final = (
    Column("runs", "set"),
    Column("number", "runs"),
    Column("calls", "calls"),
    Column("of tools that read", "safe"),
    Column("answer with a call, ms", lambda r: f"{r['answer_ms']:.0f}"),
    Column("plain, s (tools)", _of(PLAIN, "{seconds:.1f} ({tool_s:.1f})")),
    Column("can be saved at most", lambda r: f"{100 * most(r):.0f} %"),
    Column("of all runs of the set", lambda r: f"{100 * r['whole_safe_s'] / r['whole_s']:.0f} %"),
    Column("prefetching, s (tools)", _of(AHEAD, "{seconds:.1f} ({tool_s:.1f})")),
    Column("ahead / in vain", _of(AHEAD, "{used} / {wrong}")),
    Column("shorter (single runs)", _shorter(AHEAD)),
    Column("results kept, s (tools)", _of(KEPT, "{seconds:.1f} ({tool_s:.1f})")),
    Column("ahead / in vain, kept", _of(KEPT, "{used} / {wrong}")),
    Column("shorter, kept (single runs)", _shorter(KEPT)),
    Column("same texts, results, effects", lambda r: f"{r['same']} of {r['runs']}"),
)


def about(result: Mapping[str, Any]) -> str:
    facts = result["machine"]
    return (
        f"{facts['model']}, {facts['cpu']}, {facts['cores']} cores, `{result['command']}`, {facts['date']}, "
        f"commit {facts['commit']}: whole runs, texts for the user included; in brackets the time in which "
        "the agent waited for tools. At most the time of tools that read can be saved: measured in these "
        "runs, and computed from their times of a token and of a call for all runs of the set."
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench prefetch-served", description=__doc__)
    made.add_argument("--model", default=MODEL)
    made.add_argument("--sets", default=",".join(prefetch.SETS), help="data sets, by commas")
    made.add_argument("--runs", type=int, default=RUNS, help="of each data set")
    made.add_argument("--tool-ms", type=int, default=round(1000 * prefetch.TOOL_S))
    made.add_argument("--max-prompt", type=int, default=MAX_PROMPT, help="tokens: longer runs are left out")
    made.add_argument("--threads", type=int, default=limits.cores())
    made.add_argument("--timelines", type=int, default=0, help="runs whose two timelines are printed")
    made.add_argument("--write", action="store_true", help="keep the result in bench/results")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments or ())
    options = parser().parse_args(given)
    servers.end_with_this_process()
    rows, whole = measure(options)
    sums = totals(rows, whole)
    Console(width=220).print(Table.of(COLUMNS, sums, "recorded runs with slow tools").terminal())
    if options.write:
        pages.keep(f"{RESULT}-{options.model}", "prefetch-served", given, options.model, rows=sums, runs=rows)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Amounts]]:
    folder = workload.data_folder()
    if folder is None:
        raise SystemExit("no data: set PACELINE_DATA to the folder that holds traces/")
    tokenizer, runs = Tokenizer.load(hub.resolve(options.model)), list[RecordedRun]()
    histories, whole = dict[str, list[list[Record]]](), dict[str, Amounts]()
    for name in options.sets.split(","):
        paths = [folder / "traces" / f"{file}.jsonl.gz" for file in prefetch.SETS[name]]
        records = [record for path in paths for record in workload.lines(path)]
        chosen, history = choose(name, records, tokenizer, options.runs, options.max_prompt)
        runs += chosen
        histories |= history
        whole[name] = Amounts.of(records, tokenizer)
    return served_rows(options, runs, histories), whole


def served_rows(
    options: argparse.Namespace,
    runs: Sequence[RecordedRun],
    histories: Mapping[str, Sequence[Sequence[Record]]],
) -> list[dict[str, Any]]:
    """Starts a server whose predictors know these histories, by tenant, and replays the runs on it."""
    with tempfile.TemporaryDirectory() as cache:
        files = PredictorFiles(Path(cache), options.model)
        for owner, batches in histories.items():
            predictor = learned(batches)
            for way in (AHEAD, KEPT):
                files.write(tenant_of(None, user(owner, way)), predictor)
        served = servers.paceline(
            options.model, options.threads, 2, options=["--cache-dir", cache], module=SERVER
        )
        try:
            read(served.port, CHAT, {**WARM_UP, "model": options.model, "user": "warm-up"})
            client = Client(served.port, options.model, options.tool_ms / 1000)
            return replay_all(client, runs, options.timelines)
        finally:
            served.close()


def replay_all(client: Client, runs: Sequence[RecordedRun], timelines: int) -> list[dict[str, Any]]:
    rows = []
    for number, run in enumerate(runs):
        for way in WAYS:
            client.read_head(run, way)
        order = deque(WAYS)
        order.rotate(number)
        ways = {way: client.replay(run, way) for way in order}
        rows.append(row(run, ways))
        _report(run, ways, number < timelines)
    return rows


def _report(run: RecordedRun, ways: Mapping[str, Replay], timelines: bool) -> None:
    for way in WAYS:
        print(f"{run.set} {run.id}, {way}: {ways[way].seconds:.2f} s", file=sys.stderr, flush=True)
        if timelines:
            print(*ways[way].timeline, sep="\n")
