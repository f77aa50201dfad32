"""python -m bench advise: what `paceline advise` predicts against what the engine then does.

The conversations of each file are split in two. Advice comes from one half; the real engine then answers
requests of the other half, plain and as advised, in turns. Tokens per pass do not depend on the machine's
load; speed-ups do. With --state, what is done is kept in a file, so that several calls of about --seconds
make the advice and answer all requests. They should follow one another: a machine that reads its memory
faster an hour later has other speed-ups.

python -m bench advise --file tau-bench --file bfcl-single --write
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from bench import machine, pages, results_folder, workload
from bench.table import Column, Table
from paceline import LLM, EngineConfig, SpecConfig
from paceline.advise.advice import AdviceConfig, RouteAdvice, advise_routes, ratios
from paceline.advise.advice import Engine as Advisor
from paceline.advise.target_outputs import OutputLimits, prepared, read_prompt
from paceline.advise.traffic import TracedRequest, Traffic, from_files, sample, turns_before
from paceline.cli.advise import classify
from paceline.drafters import model_free
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.cost import confirmed_cost_table
from paceline.types import Drafter, Round, Seq

FILES: Final = ("tau-bench", "bfcl-single", "bfcl-multi", "spec-bench")
MAX_RATE_ERROR: Final = 0.10  # of tokens per pass
MAX_SPEEDUP_ERROR: Final = 0.15
ARMS: Final = ("plain", "advised")

Prediction = dict[str, Any]  # of a route, as JSON
Answered = dict[str, Any]  # one request, both ways, as JSON


@dataclass(frozen=True, slots=True)
class Run:
    """One output, from its second token on."""

    tokens: int
    passes: int
    decode_s: float
    all_s: float  # from the request on


def split(traffic: Traffic) -> tuple[Traffic, Traffic]:
    """Whole conversations, by a hash."""
    halves: tuple[list[TracedRequest], list[TracedRequest]] = [], []
    for request in traffic.requests:
        digest = hashlib.sha256(request.conversation.encode("utf-8", "surrogatepass")).digest()
        halves[digest[0] % 2].append(request)
    return Traffic(tuple(halves[0])), Traffic(tuple(halves[1]))


def predicted(one: RouteAdvice) -> Prediction:
    """What is measured then."""
    return {
        "drafters": one.best.drafters,
        "max_draft": one.best.max_draft,
        "enabled": one.enabled,
        "reason": one.reason,
        "tokens_per_pass": asdict(one.best.tokens_per_pass),
        "speedup": asdict(one.best.speedup),
        "turn_speedup": one.best.turn_speedup.value if one.concurrency == 1 else None,
        "advised_on": one.outputs,
        "conversations": one.replayed,
    }


class Measurement:
    """The other half of a route: plain and as advised, each with a prefix cache of its own."""

    def __init__(
        self,
        llm: LLM,
        heads: Mapping[str, Drafter],
        advice: Prediction,
        limits: OutputLimits,
        concurrency: int,
    ) -> None:
        self._llm, self._limits, self._concurrency = llm, limits, concurrency
        advised = SpecConfig(tuple(advice["drafters"]), advice["max_draft"])
        self._specs = dict(zip(ARMS, (SpecConfig((), max_draft=0), advised), strict=True))
        config = EngineConfig(max_batch=concurrency)
        self._engines = {
            arm: Engine(
                llm.target, {**model_free(), **heads}, Rate(llm.cost), (), config, llm.tokenizer.eos_ids,
                row_cost=llm.cost.prompt_row_ms,
            )
            for arm in ARMS
        }  # fmt: skip

    def answers(
        self, requests: Sequence[TracedRequest], before: Mapping[str, TracedRequest], done: int
    ) -> Iterator[tuple[int, list[Answered]]]:
        """In small groups, whose order of arms alternates, from the request number `done` on.

        With each group the number of the next request.
        """
        size = 1 if self._concurrency == 1 else 6 * self._concurrency  # few end with free places
        for first in range(done, len(requests), size):
            group = [
                (r, seq) for r in requests[first : first + size] if (seq := self._prepared(r)) is not None
            ]
            found: dict[str, list[tuple[Run, list[int]]]] = {}
            for arm in ARMS[:: 1 if (first // size) % 2 else -1]:
                for request, _ in group:
                    self._read(before.get(request.id), arm)
                seqs = [self._copy(seq, arm, request.id) for request, seq in group]
                runs = answer(self._engines[arm], seqs, self._concurrency)
                found[arm] = list(zip(runs, [seq.output for seq in seqs], strict=True))
            yield (
                min(first + size, len(requests)),
                [
                    {
                        "conversation": request.conversation,
                        "plain": asdict(plain[0]),
                        "advised": asdict(advised[0]),
                        "same_text": plain[1] == advised[1],
                    }
                    for (request, _), plain, advised in zip(group, *(found[arm] for arm in ARMS), strict=True)
                ],
            )

    def _read(self, request: TracedRequest | None, arm: str) -> None:
        """The turn before: a conversation finds it in the prefix cache."""
        if request is not None and (seq := self._prepared(request)) is not None:
            read_prompt(self._engines[arm], self._copy(seq, arm, f"before {request.id}"))

    def _prepared(self, request: TracedRequest) -> Seq | None:
        """None: it cannot be asked, or is too long."""
        try:
            seq = prepared(self._llm, request, self._limits)
        except PacelineError:
            return None
        longest = min(self._limits.max_prompt, self._llm.target.max_context - 1)
        return seq if seq.prompt_len <= longest else None

    def _copy(self, seq: Seq, arm: str, name: str) -> Seq:
        cursor = None if seq.cursor is None else seq.cursor.clone()
        spec, tenant = self._specs[arm], f"{arm} {seq.tenant}"
        return replace(
            seq, id=f"{arm} {name}", tokens=list(seq.tokens), spec=spec, tenant=tenant, cursor=cursor
        )


def answer(engine: Engine, seqs: Sequence[Seq], concurrency: int = 1) -> list[Run]:
    """So many at once; the runs in the order of the sequences."""
    started, waiting = dict[str, float](), list(seqs)[::-1]
    rounds: dict[str, list[tuple[Round, float]]] = {seq.id: [] for seq in seqs}
    while waiting or engine.busy:
        while waiting and engine.running + engine.waiting < concurrency:
            seq = waiting.pop()
            started[seq.id] = time.perf_counter()
            engine.submit(seq)
        done = engine.step()
        now = time.perf_counter()
        for r in done:
            if r.error is not None:
                raise r.error
            if r.tokens:
                rounds[r.request].append((r, now))
    runs = []
    for seq in seqs:
        (_, first), *decoding = rounds[seq.id]
        last = decoding[-1][1] if decoding else first
        tokens = sum(len(r.tokens) for r, _ in decoding)
        runs.append(Run(tokens, len(decoding), last - first, last - started[seq.id]))
    return runs


def row(route: str, advice: Prediction, answered: Sequence[Answered]) -> dict[str, Any]:
    """A line of the table: intervals on both sides are from resampled conversations."""
    figures = [
        (fast["tokens"], fast["passes"], plain["decode_s"], fast["decode_s"], plain["all_s"], fast["all_s"])
        for plain, fast in ((one["plain"], one["advised"]) for one in answered)
    ]
    rate, speedup, turns = ratios([one["conversation"] for one in answered], figures)
    return {
        "route": route,
        **{name: advice[name] for name in ("max_draft", "enabled", "reason", "advised_on")},
        "drafters": "+".join(advice["drafters"]),
        "predicted_tokens_per_pass": advice["tokens_per_pass"],
        "measured_tokens_per_pass": asdict(rate),
        "predicted_speedup": advice["speedup"],
        "measured_speedup": asdict(speedup),
        "predicted_turn_speedup": advice["turn_speedup"],
        "measured_turn_speedup": turns.value,
        "outputs": len(answered),
        "conversations": [advice["conversations"], len({one["conversation"] for one in answered})],
        "different_texts": sum(not one["same_text"] for one in answered),
    }


def _error(row: Mapping[str, Any], figure: str) -> float:
    predicted, measured = row[f"predicted_{figure}"], row[f"measured_{figure}"]
    return float(predicted["value"] / max(1e-9, measured["value"]) - 1)


def _pair(figure: str, unit: str = "") -> Any:
    def cell(row: Mapping[str, Any]) -> str:
        both = (_interval(row[f"{side}_{figure}"], unit) for side in ("predicted", "measured"))
        return f"{' / '.join(both)}: {100 * _error(row, figure):+.0f} %"

    return cell


def _interval(of: Mapping[str, float], unit: str) -> str:
    if of["low"] == of["high"]:
        return f"{of['value']:.2f}{unit}"
    return f"{of['value']:.2f}{unit} ({of['low']:.2f} to {of['high']:.2f})"


def _turns(row: Mapping[str, Any]) -> str:
    predicted, measured = row["predicted_turn_speedup"], row["measured_turn_speedup"]
    return f"{'-' if predicted is None else f'{predicted:.2f} x'} / {measured:.2f} x"


COLUMNS: Final = (
    Column("route", "route"),
    Column("drafters", lambda row: f"{row['drafters']}, {row['max_draft']}"),
    Column("tokens per pass", _pair("tokens_per_pass")),
    Column("decoding", _pair("speedup", " x")),
    Column("whole turns", _turns),
    Column("outputs", lambda row: f"{row['advised_on']} / {row['outputs']}"),
    Column("conversations", lambda row: "{} / {}".format(*row["conversations"])),
    Column("other text", lambda row: str(row["different_texts"])),
)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    close = sum(abs(_error(row, "tokens_per_pass")) <= MAX_RATE_ERROR for row in rows)
    fast = sum(abs(_error(row, "speedup")) <= MAX_SPEEDUP_ERROR for row in rows)
    return (
        f"tokens per pass within {100 * MAX_RATE_ERROR:.0f} % on {close} of {len(rows)} routes, "
        f"speed-up within {100 * MAX_SPEEDUP_ERROR:.0f} % on {fast}"
    )


class State:
    """What earlier calls have done, by route: the prediction, the requests tried, and those answered."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.routes: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self.routes = json.loads(path.read_text())

    def save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.routes))

    def rows(self) -> list[dict[str, Any]]:
        return [row(name, of["advice"], of["answered"]) for name, of in self.routes.items() if of["answered"]]


def main(arguments: Sequence[str]) -> None:
    args = _arguments(arguments)
    state, deadline = State(args.state), time.monotonic() + args.seconds
    names = args.file or [n for n in FILES if n in workload.known()]
    if args.seconds:
        _measure(args, names, state, deadline)
    rows = state.rows()
    if not rows:
        return
    title = f"advise, {machine.called(args.model)}: predicted / measured on other conversations"
    print("\n".join(Table.of(COLUMNS, rows, title).markdown()))
    print(summary(rows))
    if args.write:
        name = machine.called(args.model)
        result = {
            "machine": {**machine.facts(), "model": name},
            "command": machine.command("advise", [*_again(args), *(f"--file={one}" for one in state.routes)]),
            "at_once": args.at_once,
            "rows": rows,
            "summary": summary(rows),
        }
        results_folder.write(result, f"advise-{name}" + (f"-{args.at_once}" if args.at_once > 1 else ""))
        pages.write()


def _again(args: argparse.Namespace) -> list[str]:
    """The same in one call."""
    return [f"--model={args.model}", f"--requests={args.requests}", f"--at-once={args.at_once}"]


def _measure(args: argparse.Namespace, names: Sequence[str], state: State, deadline: float) -> None:
    llm = LLM(args.model, trained=args.trained, spec=SpecConfig(), config=EngineConfig(cache_mb=2048))
    heads = {name: llm.drafters[name] for name in llm.trained.values()}
    limits = OutputLimits(args.max_tokens, args.max_prompt, 60 * args.minutes)
    for given in names:
        name = Path(given).name.partition(".")[0]  # of a workload or of a file
        traffic = from_files([_path(given)], classify)
        halves = split(Traffic(tuple(replace(request, route=name) for request in traffic.requests)))
        if name not in state.routes:
            llm.cost, quiet = confirmed_cost_table(llm.target, llm.cost)
            if not quiet:
                print("the machine was busy while passes were measured: speed-ups mean little")
            advisor = Advisor(llm, lambda: Rate(llm.cost), Fixed, llm.cost, classify, heads)
            config = AdviceConfig(args.requests, args.at_once, args.seed, limits=limits)
            (one,) = advise_routes(advisor, halves[0], config, _tell)
            state.routes[name] = {"advice": predicted(one), "tried": 0, "answered": []}
            state.save()
            if args.state and time.monotonic() > deadline:
                return
        of, theirs = state.routes[name], halves[1].requests
        chosen = sample(theirs, args.requests, Random(f"{args.seed} {name}"))
        measurement = Measurement(llm, heads, of["advice"], limits, args.at_once)
        for tried, group in measurement.answers(chosen, turns_before(theirs), of["tried"]):
            of |= {"tried": tried, "answered": of["answered"] + group}
            if args.state and time.monotonic() > deadline:
                break
        state.save()
        _tell(name, of["tried"], len(chosen))
        if args.state and time.monotonic() > deadline:
            return


def _tell(what: str, done: int, of: int) -> None:
    print(f"{what}: {done} of {of}", file=sys.stderr)


def _path(name: str) -> Path:
    known = workload.known()
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    raise SystemExit(f"--file {name!r}: expected a file, or one of {', '.join(known)}")


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench advise", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trained", action="append", help="a trained drafter to consider; repeat it")
    parser.add_argument("--file", action="append", help="a workload or a file of conversations; repeat it")
    parser.add_argument("--requests", type=int, default=96, help="of each file and half")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=20.0, help="for the answers that the advice is from")
    parser.add_argument("--at-once", type=int, default=1, help="outputs at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="a file that keeps what is done, for the next call")
    parser.add_argument("--seconds", type=float, default=120.0, help="for measuring, with --state; 0: none")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args(list(arguments))
