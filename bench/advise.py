"""python -m bench advise: what `paceline advise` predicts against what the engine then does.

The conversations of each file are split in two. Advice comes from one half; the real engine then answers
requests of the other half, plain and as advised, in turns. Tokens per pass do not depend on the machine's
load; speed-ups do.

python -m bench advise --file tau-bench --file bfcl-single --requests 24 --write
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from bench import machine, pages, results_folder, workload
from bench.table import Column, Table
from paceline import LLM, EngineConfig, SpecConfig
from paceline.advise.advice import AdviceConfig, RouteAdvice, advise_routes
from paceline.advise.advice import Engine as Advisor
from paceline.advise.replay import RecordedOutput, Simulation
from paceline.advise.target_outputs import OutputLimits, prepared
from paceline.advise.traffic import TracedRequest, Traffic, from_files, sample
from paceline.cli.advise import classify
from paceline.drafters import model_free
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.cost import MAX_SPREAD
from paceline.types import Drafter, Round, Seq

FILES: Final = ("tau-bench", "bfcl-single", "bfcl-multi", "spec-bench")
MAX_RATE_ERROR: Final = 0.10  # of tokens per pass
MAX_SPEEDUP_ERROR: Final = 0.15


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs of one route, from their second tokens on."""

    tokens: int = 0
    passes: int = 0
    decode_s: float = 0.0
    all_s: float = 0.0

    def __add__(self, other: "Run") -> "Run":
        return Run(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.decode_s + other.decode_s,
            self.all_s + other.all_s,
        )

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)


def split(traffic: Traffic) -> tuple[Traffic, Traffic]:
    """Whole conversations, by a hash."""
    halves: tuple[list[TracedRequest], list[TracedRequest]] = [], []
    for request in traffic.requests:
        digest = hashlib.sha256(request.conversation.encode("utf-8", "surrogatepass")).digest()
        halves[digest[0] % 2].append(request)
    return Traffic(tuple(halves[0])), Traffic(tuple(halves[1]))


def measure(
    llm: LLM,
    heads: Mapping[str, Drafter],
    one: RouteAdvice,
    requests: Sequence[TracedRequest],
    limits: OutputLimits,
) -> dict[str, Any]:
    """The other half of a route: plain and as advised, each in a prefix cache of its own."""
    advised = SpecConfig(one.best.drafters, one.best.max_draft)
    specs = {"plain": SpecConfig((), max_draft=0), "advised": advised}
    engines = {
        name: Engine(llm.target, {**model_free(), **heads}, Rate(llm.cost), eos=llm.tokenizer.eos_ids)
        for name in specs
    }
    runs, recorded, different = dict.fromkeys(specs, Run()), list[RecordedOutput](), 0
    for number, request in enumerate(requests):
        try:
            seq = prepared(llm, request, limits)
        except PacelineError:
            continue
        if seq.prompt_len > min(limits.max_prompt, llm.target.max_context - 1):
            continue
        outputs = {}
        for name in list(specs)[:: 1 if number % 2 else -1]:
            copy = _copy(seq, f"{name} {number}", specs[name], f"{name} {one.route}")
            runs[name] += answer(engines[name], copy)
            outputs[name] = tuple(copy.output)
        different += outputs["plain"] != outputs["advised"]
        recorded.append(RecordedOutput(seq, outputs["plain"]))
    tapped = any(heads[name].taps for name in heads if name in advised.drafters)
    replayed = None if tapped else _replayed(llm, advised, recorded)
    plain, fast = runs["plain"], runs["advised"]
    return {
        "route": one.route,
        "drafters": one.best.name,
        "max_draft": one.best.max_draft,
        "enabled": one.enabled,
        "reason": one.reason,
        "predicted_tokens_per_pass": one.best.tokens_per_pass.value,
        "interval": [one.best.tokens_per_pass.low, one.best.tokens_per_pass.high],
        "measured_tokens_per_pass": fast.tokens_per_pass,
        "replayed_tokens_per_pass": replayed,
        "predicted_speedup": one.best.speedup.value,
        "measured_speedup": plain.decode_s / max(1e-9, fast.decode_s),
        "predicted_turn_speedup": one.best.turn_speedup,
        "measured_turn_speedup": plain.all_s / max(1e-9, fast.all_s),
        "outputs": len(recorded),
        "advised_on": one.outputs,
        "different_texts": different,
    }


def _copy(seq: Seq, name: str, spec: SpecConfig, tenant: str) -> Seq:
    cursor = None if seq.cursor is None else seq.cursor.clone()
    return replace(seq, id=name, tokens=list(seq.tokens), spec=spec, tenant=tenant, cursor=cursor)


def answer(engine: Engine, seq: Seq) -> Run:
    started = time.perf_counter()
    engine.submit(seq)
    rounds: list[Round] = []
    first = last = started
    while engine.busy:
        for r in engine.step():
            if r.error is not None:
                raise r.error
            last = time.perf_counter()
            if r.tokens:
                first = first if rounds else last
                rounds.append(r)
    decoding = rounds[1:]
    tokens = sum(len(r.tokens) for r in decoding)
    return Run(tokens, len(decoding), last - first, last - started)


def _replayed(llm: LLM, spec: SpecConfig, outputs: Sequence[RecordedOutput]) -> float:
    """Tokens per pass of a replay of the very texts that were measured: the error of the replay alone."""
    some = [one for one in outputs if len(one.output) > 1]
    simulation = Simulation(spec, llm.target, model_free(), Rate(llm.cost), llm.cost)
    done = simulation.run(some)
    return sum(d.tokens for d in done) / max(1, sum(d.passes for d in done))


def _error(row: Mapping[str, Any], figure: str) -> float:
    predicted, measured = row[f"predicted_{figure}"], row[f"measured_{figure}"]
    return float(predicted / max(1e-9, measured) - 1)


def _pair(figure: str, unit: str = "") -> Any:
    def cell(row: Mapping[str, Any]) -> str:
        predicted, measured = row[f"predicted_{figure}"], row[f"measured_{figure}"]
        return f"{predicted:.2f}{unit} / {measured:.2f}{unit} ({100 * _error(row, figure):+.0f} %)"

    return cell


COLUMNS: Final = (
    Column("route", "route"),
    Column("drafters", lambda row: f"{row['drafters']}, {row['max_draft']}"),
    Column("tokens per pass", _pair("tokens_per_pass")),
    Column("replay of the same texts", lambda row: _number(row["replayed_tokens_per_pass"])),
    Column("decoding", _pair("speedup", " x")),
    Column("whole turns", _pair("turn_speedup", " x")),
    Column("outputs", lambda row: f"{row['advised_on']} / {row['outputs']}"),
    Column("other text", lambda row: str(row["different_texts"])),
)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    close = sum(abs(_error(row, "tokens_per_pass")) <= MAX_RATE_ERROR for row in rows)
    fast = sum(abs(_error(row, "speedup")) <= MAX_SPEEDUP_ERROR for row in rows)
    return (
        f"tokens per pass within {100 * MAX_RATE_ERROR:.0f} % on {close} of {len(rows)} routes, "
        f"speed-up within {100 * MAX_SPEEDUP_ERROR:.0f} % on {fast}"
    )


def main(arguments: Sequence[str]) -> None:
    args = _arguments(arguments)
    paths = [_path(name) for name in args.file or [n for n in FILES if n in workload.known()]]
    known, measured_on = split(from_files(paths, classify))
    llm = LLM(args.model, trained=args.trained, spec=SpecConfig(), config=EngineConfig(cache_mb=2048))
    heads = {name: llm.drafters[name] for name in llm.trained.values()}
    limits = OutputLimits(args.max_tokens, args.max_prompt, 60 * args.minutes)
    advisor = Advisor(llm, lambda: Rate(llm.cost), Fixed, llm.cost, classify, heads)
    config = AdviceConfig(args.requests, 1, args.seed, limits=limits)
    told = lambda what, done, of: print(f"{what}: {done} of {of}", file=sys.stderr)  # noqa: E731
    advised = advise_routes(advisor, known, config, told)
    rows = []
    for one in advised:
        theirs = measured_on.routes().get(one.route, [])
        fitting = sample(theirs, args.requests, Random(f"{args.seed} {one.route}"))
        rows.append(measure(llm, heads, one, fitting, limits))
        print(f"{one.route} is measured", file=sys.stderr)
    title = f"advise, {machine.called(args.model)}: predicted / measured on other conversations"
    print("\n".join(Table.of(COLUMNS, rows, title).markdown()))
    print(summary(rows))
    if llm.cost.spread > MAX_SPREAD:
        print("the machine was busy while passes were measured: speed-ups mean little")
    if args.write:
        name = machine.called(args.model)
        result = {
            "machine": {**machine.facts(), "model": name},
            "command": machine.command("advise", arguments),
            "rows": rows,
            "summary": summary(rows),
        }
        results_folder.write(result, f"advise-{name}")
        pages.write()


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
    parser.add_argument("--requests", type=int, default=24, help="of each file and half")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=20.0, help="for the answers that the advice is from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    return parser.parse_args(list(arguments))
