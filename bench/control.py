"""python -m bench control: the controller against plain decoding and fixed draft lengths, as load rises.

So many agents are answered at once, turn after turn, each to its natural end: whoever is done has the next
turn at once. Prompts are read before. Several agents are timed while all of them are at work, up to the first
one for whom no turn is left: a batch that empties is a smaller load, and takes as long as its longest answer,
whatever the others gain. If there are too few turns, they come again, for other tenants, who share no memory.
All ways answer a group of turns side by side, each for 50 ms by turns in an order drawn anew, so that a
slow moment of the machine hits all of them. On a GPU, and with --stand-in, they do so one after another:
there it is the pauses that slow passes down. Each begins a repeat with an empty memory of texts. What a
controller has learned stays from repeat to repeat, of which the first is not counted, and from case to
case, as a server's does. Hindsight is the best of plain decoding and the fixed lengths of that case. With
--trained, the same list without the trained drafters is one more way: the list with them should never
lose to it.

Besides agents' turns and chats there are both by turns (`mixed`), and chats with a drafter that is always
wrong, or that is right for 40 tokens and wrong for as many; it claims to be sure. `holds` says whether
adaptive keeps the bound: for one agent at most 1.02 times the time of plain decoding and 15 tokens, all its
turns together; for several at least 0.99 of its throughput.

--stand-in replays the model's answers with the times of SmolLM2's passes on an H200, to see what the host
adds to them: in `host`, microseconds that all agents together wait for it in a pass, plain and adaptive.

--write keeps the rows of earlier runs of the same model and list: those measured again are replaced.

python -m bench control --short --write
python -m bench control --workload "always wrong,flips every 40" --loads 1,32 --only adaptive --write
python -m bench control --short --trained smollm2-135m-block --only adaptive --write
"""

import argparse
import gc
import random
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeVar

from rich.console import Console

from bench import machine, results_folder, workload
from bench.drafters.turns import AGENTS, CHAT, Turn, files, gather
from bench.spread import Spread
from bench.stand_in import GPU, StandIn
from bench.table import Column, Table
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig, hub
from paceline.drafters import model_free
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.target.eager.target import placement
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

T = TypeVar("T")
LOADS: Final = (1, 4, 16, 32)
FIXED: Final = (3, 5, 8)
PLAIN, ADAPTIVE, HINDSIGHT = "plain", "adaptive", "hindsight best"
UNTRAINED: Final = "adaptive, untrained"  # the list without trained drafters
SLOWER, SLOWER_TOKENS = 1.02, 15  # times plain decoding, and tokens: the most that one agent may take
THROUGHPUT: Final = 0.99  # of plain decoding, at least, for several
MIN_TURNS: Final = 2  # of each of several agents
# Results of earlier versions: one way after another, to the last token of all.
TIMED: Final = "while all agents are at work, on a CPU by turns of 50 ms"
CACHE_MB: Final = 3072  # for the sequences of all ways at once
TURN_S: Final = 0.05  # of a way on a CPU, while the others wait
MIXED, WRONG, FLIPS = "mixed", "always wrong", "flips every 40"
# The kinds of turns of a workload, which come by turns.
WORKLOADS: Final = {AGENTS: (AGENTS,), CHAT: (CHAT,), MIXED: (AGENTS, CHAT), WRONG: (CHAT,), FLIPS: (CHAT,)}
ADVERSARIES: Final = {
    WRONG: 0,
    FLIPS: 40,
}  # drafters: tokens of an answer for which each is right, then wrong
SHORT: Final = [
    "--workload",
    "agents,chat,mixed",
    "--loads",
    "1,4,16",
    "--turns",
    "32",
    "--tokens",
    "64",
    "--repeats",
    "3",
    "--temperature",
    "0,0.7",
]


@dataclass(frozen=True)
class Case:
    workload: str
    temperature: float
    load: int


@dataclass(frozen=True)
class Timing:
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    passes: int = 0
    host_s: float = 0.0  # beside the passes of a stand-in

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(
            self.tokens + other.tokens,
            self.rounds + other.rounds,
            self.seconds + other.seconds,
            self.passes + other.passes,
            self.host_s + other.host_s,
        )


class Adversary(Drafter):
    """Knows the answer: right for so many tokens, wrong for as many, and sure of both. 0: always wrong."""

    def __init__(self, name: str, right: int) -> None:
        self.name, self._right = name, right
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompt
        self._of: dict[str, list[int]] = {}  # by sequence

    def begin(self, seq: Seq) -> None:
        self._of[seq.id] = self.answers.get(tuple(seq.tokens[: seq.prompt_len]), [])

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        first = len(ask.seq.tokens) - ask.seq.prompt_len + len(ask.after)
        answer = self._of[ask.seq.id][first : first + ask.budget]
        if not answer:
            return NO_DRAFT
        guesses = [t if self._is_right(i) else t ^ 1 for i, t in enumerate(answer, first)]
        return Draft(tuple(guesses), None, (self.name,) * len(guesses), (0.9,) * len(guesses))

    def _is_right(self, position: int) -> bool:
        return self._right > 0 and position // self._right % 2 == 0

    def end(self, seq: Seq) -> None:
        self._of.pop(seq.id, None)


class Runs:
    """One controller for each way, on the one target."""

    def __init__(self, llm: LLM, ways: dict[str, SpecConfig], tokens: int, stand_in: bool = False) -> None:
        self._stand_in = StandIn(llm.target.vocab_size) if stand_in else None
        beside = stand_in or placement(llm.engine.config)[0].type == "cuda"
        self._turn_s = inf if beside else TURN_S
        self._target, self._eos, self._tokens, self._ids, self._ways = (
            llm.target,
            llm.tokenizer.eos_ids,
            tokens,
            count(),
            ways,
        )
        self._config = EngineConfig(max_batch=max(LOADS), cache_mb=llm.engine.config.cache_mb)
        self._heads = {name: d for name, d in llm.drafters.items() if d.taps}
        self._adversaries = {name: Adversary(name, right) for name, right in ADVERSARIES.items()}
        self._made: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = {}  # answers
        self._controllers = {way: Rate(GPU if stand_in else llm.cost or None) for way in ways}

    def read(self, turns: Sequence[Turn]) -> None:
        """Prompts into all caches. Drafters that read hidden states must see a prompt's only pass."""
        for turn in dict.fromkeys(turns):
            engine, spec = self._engine(), SpecConfig(tuple(self._heads) or ("none",), 1, adaptive=False)
            engine.submit(self._seq(turn, SamplingParams(max_tokens=2), spec))
            while engine.busy:
                engine.step()

    def timings(self, case: Case, turns: Sequence[Turn], seed: int, rng: random.Random) -> dict[str, Timing]:
        """Of decoding, all agents together: of each way."""
        engines = {way: self._engine(controller) for way, controller in self._controllers.items()}
        done = dict.fromkeys(engines, Timing())
        params = SamplingParams(temperature=case.temperature, seed=seed, max_tokens=self._tokens)
        adversary = self._adversaries.get(case.workload)
        if self._stand_in is not None:
            self._stand_in.answers = self._answers(turns, replace(params, seed=0))
        for group in groups(turns, case.load):
            if adversary is not None:
                self._tell(adversary, group, params)
            answering = {}
            for way, engine in engines.items():
                spec = self._ways[way]
                if adversary is not None and spec.max_draft:
                    spec = replace(spec, drafters=(adversary.name,))
                seqs = [self._seq(turn, params, spec) for turn in group]
                answering[way] = answer(engine, seqs, case.load, self._turn_s)
            for way, timing in side_by_side(answering, rng).items():
                done[way] += timing
        return done

    def _tell(self, adversary: Adversary, group: Sequence[Turn], params: SamplingParams) -> None:
        """The answers, which are the same in every way."""
        adversary.answers = self._answers(group, params)

    def _answers(self, turns: Sequence[Turn], params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
        """The model's own, by prompt; each is made once."""
        asked = {tuple(turn.prompt.tokens): turn for turn in turns}
        missing = [turn for prompt, turn in asked.items() if (prompt, params) not in self._made]
        seqs = [self._seq(turn, params, self._ways[PLAIN]) for turn in missing]
        side_by_side({PLAIN: answer(self._engine(), seqs, len(seqs), inf)}, random.Random(0))
        self._made |= {(tuple(seq.tokens[: seq.prompt_len]), params): seq.output for seq in seqs}
        return {prompt: self._made[prompt, params] for prompt in asked}

    def _engine(self, controller: Rate | None = None) -> Engine:
        drafters = {**model_free(), **self._heads, **self._adversaries}
        target = self._target if controller is None or self._stand_in is None else self._stand_in
        return Engine(target, drafters, controller or Rate(), config=self._config, eos=self._eos)

    def _seq(self, turn: Turn, params: SamplingParams, spec: SpecConfig) -> Seq:
        prompt, tenant = list(turn.prompt.tokens), f"{turn.prompt.workload}{turn.tenant}"
        return Seq(f"{next(self._ids)}", prompt, len(prompt), params, spec, tenant, cursor=turn.cursor())


def answer(engine: Engine, seqs: Sequence[Seq], load: int, turn_s: float) -> Generator[None, None, Timing]:
    """So many at once, from prompts in the cache until the first place stays empty. It stops every turn_s.

    A draft may come with the first token, or after it. Those who are left then are answered off the clock.
    """
    timing, left = Timing(), iter(seqs)
    target = engine.target if isinstance(engine.target, StandIn) else None
    first, full = list(islice(left, load)), bool(seqs)
    while full:
        started, busy_s, turn_ends = perf_counter(), target.busy_s if target else 0.0, False
        for seq in first:
            engine.submit(seq)
        first = []
        while full and not turn_ends:
            rounds = engine.step()
            timing += Timing(sum(len(r.tokens) for r in rounds), len(rounds), passes=1)
            for _ in [r for r in rounds if r.finish is not None]:
                if (following := next(left, None)) is not None:
                    engine.submit(following)
                else:
                    full = False
            turn_ends = perf_counter() - started >= turn_s
        seconds = perf_counter() - started
        timing += Timing(seconds=seconds, host_s=seconds - (target.busy_s - busy_s) if target else 0.0)
        if full:
            yield
    while engine.busy:
        engine.step()
    return timing


def side_by_side(ways: Mapping[str, Generator[None, None, Timing]], rng: random.Random) -> dict[str, Timing]:
    """All of them, by turns."""
    left, done = dict(ways), dict[str, Timing]()
    while left:
        for way in rng.sample(list(left), len(left)):
            try:
                next(left[way])
            except StopIteration as end:
                done[way] = end.value
                del left[way]
    return done


def groups(turns: Sequence[Turn], load: int) -> list[list[Turn]]:
    """Turns of one agent are groups of their own; those of several are one, with enough for each of them."""
    if load == 1:
        return [[turn] for turn in turns]
    laps = -(-MIN_TURNS * load // len(turns))
    return [[turn.of(f"{lap}") if lap else turn for lap in range(max(1, laps)) for turn in turns]]


def ways(drafters: tuple[str, ...], trained: Sequence[str] = ()) -> dict[str, SpecConfig]:
    made = {PLAIN: SpecConfig(("none",), max_draft=0)}
    made |= {f"fixed {k}": SpecConfig((*drafters, *trained), k, adaptive=False) for k in FIXED}
    made[ADAPTIVE] = SpecConfig((*drafters, *trained))
    return {**made, UNTRAINED: SpecConfig(drafters)} if trained else made


def measure(
    llm: LLM,
    by_workload: dict[str, list[Turn]],
    cases: Sequence[Case],
    specs: dict[str, SpecConfig],
    tokens: int,
    repeats: int,
    stand_in: bool = False,
) -> Iterator[dict[str, Any]]:
    """One row for each case; the first repeat warms up."""
    runs, rng = Runs(llm, specs, tokens, stand_in), random.Random(0)
    for turns in by_workload.values():
        runs.read([turn for case in cases for group in groups(turns, case.load) for turn in group])
    gc.collect()
    gc.freeze()  # as the server does: a pass over the recorded traffic would hold up one way and no other
    for case in cases:
        timings: dict[str, list[Timing]] = {way: [] for way in specs}
        for repeat in range(repeats + 1):
            found = runs.timings(case, by_workload[case.workload], 100 * repeat, rng)
            if repeat:
                for way, one in found.items():
                    timings[way].append(one)
        yield row(case, timings)


def row(case: Case, timings: dict[str, list[Timing]]) -> dict[str, Any]:
    speeds = {way: [t.tokens / t.seconds for t in found] for way, found in timings.items()}
    against = {
        way: asdict(Spread.of([a / b for a, b in zip(found, speeds[PLAIN], strict=True)]))
        for way, found in speeds.items()
    }
    fixed = [way for way in speeds if way not in (ADAPTIVE, UNTRAINED)]
    best = max(fixed, key=lambda way: float(against[way]["median"]))
    adaptive = speeds[ADAPTIVE]
    hindsight = [a / b for a, b in zip(adaptive, speeds[best], strict=True)]
    untrained = [a / b for a, b in zip(adaptive, speeds.get(UNTRAINED, adaptive), strict=True)]
    return {
        **asdict(case),
        "tokens_per_s": {way: asdict(Spread.of(found)) for way, found in speeds.items()},
        "against_plain": against,
        "bound": bound(case, median([t.tokens for t in timings[PLAIN]])),
        "best": best,
        "against_best": asdict(Spread.of(hindsight)),
        "against_untrained": asdict(Spread.of(untrained)) if UNTRAINED in speeds else None,
        "host_us": {
            way: median([1e6 * t.host_s / max(1, t.passes) for t in ts]) for way, ts in timings.items()
        },
        "tokens_per_pass": {way: median([t.tokens / t.rounds for t in ts]) for way, ts in timings.items()},
    }


def bound(case: Case, tokens: float) -> float:
    """The least speed, in times plain decoding. tokens: of one agent in all its turns."""
    return 1 / (SLOWER + SLOWER_TOKENS / tokens) if case.load == 1 else THROUGHPUT


def _holds(r: dict[str, Any]) -> str:
    """Results of earlier versions have no bound."""
    if "bound" not in r:
        return "-"
    return f"{'yes' if r['against_plain'][ADAPTIVE]['median'] >= r['bound'] else 'no'}, {r['bound']:.3f}"


def _against(way: str) -> Column:
    """Ways that were not run are left out."""

    def cell(r: dict[str, Any]) -> str:
        return f"{r['against_plain'][way]['median']:.2f}" if way in r["against_plain"] else "-"

    return Column(way, cell)


def _against_untrained(r: dict[str, Any]) -> str:
    spread = r.get("against_untrained")
    return Spread(**spread).text(2) if spread else "-"


def _has_fixed(r: dict[str, Any]) -> bool:
    """Without them plain decoding is the best by default, and tells nothing in hindsight."""
    return any(way.startswith("fixed") for way in r["against_plain"])


def _best(r: dict[str, Any]) -> str:
    return f"{r['best']}: {r['against_plain'][r['best']]['median']:.2f}" if _has_fixed(r) else "-"


def _against_best(r: dict[str, Any]) -> str:
    return f"{r['against_best']['median']:.2f}" if _has_fixed(r) else "-"


COLUMNS: Final = (
    Column("workload", "workload"),
    Column("T", lambda r: f"{r['temperature']:g}"),
    Column("agents", "load"),
    Column("plain, tokens/s", lambda r: f"{r['tokens_per_s'][PLAIN]['median']:.0f}"),
    *(_against(f"fixed {k}") for k in FIXED),
    Column("adaptive", lambda r: Spread(**r["against_plain"][ADAPTIVE]).text(3)),
    Column("holds", _holds),
    Column(HINDSIGHT, _best),
    Column("adaptive / best", _against_best),
    Column("with / without trained", _against_untrained),
    Column("tokens per pass", lambda r: f"{r['tokens_per_pass'][ADAPTIVE]:.2f}"),
)
HOST: Final = Column("host, us", lambda r: f"{r['host_us'][PLAIN]:.0f}, {r['host_us'][ADAPTIVE]:.0f}")


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m bench control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--trained", action="append", default=[], help="adds this drafter to the list")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--workload", default=",".join(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--loads", type=_loads, default=list(LOADS), help="agents at once: 1,4")
    parser.add_argument("--temperature", type=_numbers, default=[0.0, 0.7, 1.5], help="0,0.7")
    parser.add_argument("--data", type=Path, default=workload.data_folder(), help="recorded traffic")
    parser.add_argument("--turns", type=_at_least_one, default=32, help="of each workload (32)")
    parser.add_argument("--max-prompt", type=int, default=600)
    parser.add_argument("--tokens", type=_at_least_one, default=96, help="of an answer, at most (96)")
    parser.add_argument("--repeats", type=_at_least_one, default=3, help="and one that warms up (3)")
    parser.add_argument("--only", choices=[ADAPTIVE], help="leave out the fixed lengths")
    parser.add_argument(
        "--stand-in", action="store_true", help="replay answers with the times of a GPU's passes"
    )
    parser.add_argument("--short", action="store_true", help="SmolLM2 in about 15 minutes on two quiet cores")
    parser.add_argument("--write", action="store_true", help="write bench/results and its page")
    options = parser.parse_args([*SHORT, *given] if "--short" in given else given)
    if options.stand_in and (options.write or options.trained):
        raise SystemExit("--stand-in is no measurement of a model: leave out --write and --trained")
    config = EngineConfig(
        device=options.device, threads=options.threads, max_batch=max(LOADS), cache_mb=CACHE_MB
    )
    llm = LLM(options.model, trained=options.trained, config=config)
    chosen = files(options.data)
    every, _ = gather(chosen, llm.tokenizer, llm.constraints, options.turns, options.max_prompt)
    by_kind = {kind: [turn for turn in every if turn.kind == kind] for kind in (AGENTS, CHAT)}
    turns = {name: chosen_turns(by_kind, name, options.turns) for name in _workloads(options.workload)}
    drafters, trained = SpecConfig().drafters, tuple(llm.trained.values())
    specs = ways(drafters, trained)
    if options.only:
        specs = {way: spec for way, spec in specs.items() if not way.startswith("fixed")}
    kinds = [kind for kind, found in turns.items() if found]
    cases = [Case(k, t, n) for k in kinds for t in options.temperature for n in options.loads]
    console, rows = Console(width=160, highlight=False), []
    columns = (*COLUMNS, HOST) if options.stand_in else COLUMNS
    for one in measure(llm, turns, cases, specs, options.tokens, options.repeats, options.stand_in):
        console.print("  ".join(f"{c.title} {c.cell(one)}" for c in columns))
        rows.append(one)
    console.print(Table.of(columns, rows).terminal(1))
    if options.write:
        name, gpu = machine.called(llm.name), placement(config)[0].type == "cuda"
        about = {
            "model": name,
            "device": "cuda" if gpu else "cpu",
            "where": llm.target.describe(),
            "drafters": list(drafters + trained),
            **machine.facts(),
        }
        command = machine.command("control", given)
        result = {"machine": about, "command": command, "timed": TIMED, "rows": sorted(rows, key=_order)}
        write(result, f"control-{name}" + ("-cuda" if gpu else "") + ("-trained" if llm.trained else ""))


def write(result: dict[str, Any], name: str) -> None:
    """Stores a result, with the rows of the one before of the same list that were not measured again."""
    from bench import pages

    with suppress(FileNotFoundError):
        result = merged(results_folder.read_one(name), result)
    results_folder.write(result, name)
    pages.write()


def merged(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rows in the order of workloads, temperatures and agents; those of before say how they were measured."""
    about, now, new = before["machine"], result["machine"], {_case(r) for r in result["rows"]}
    same = all(about.get(fact) == now.get(fact) for fact in ("drafters", "where", "cpu", "cores"))
    if not same or before.get("timed") != result["timed"]:
        return result
    run = {"command": before["command"], "date": about["date"], "commit": about["commit"]}
    kept = [{"run": run, **r} for r in before["rows"] if _case(r) not in new]
    return {**result, "rows": sorted([*kept, *result["rows"]], key=_order)}


def _case(r: dict[str, Any]) -> Case:
    return Case(r["workload"], r["temperature"], r["load"])


def _order(r: dict[str, Any]) -> tuple[int, float, int]:
    return list(WORKLOADS).index(r["workload"]), r["temperature"], r["load"]


def title(about: dict[str, Any]) -> str:
    """Of a table, by its device and the drafters beside the default ones."""
    device = " on a GPU" if about.get("device") == "cuda" else ""
    beside = [name for name in about["drafters"] if name not in SpecConfig().drafters]
    return f"the controller as load rises{device}{', with ' if beside else ''}{', '.join(beside)}"


def earlier_runs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The commands of rows that were kept from other runs."""
    runs = dict.fromkeys(tuple(r["run"].values()) for r in rows if "run" in r)
    return [f"Some rows: `{command}`, {date}, commit {commit}." for command, date, commit in runs]


def chosen_turns(by_kind: dict[str, list[T]], workload: str, number: int) -> list[T]:
    """The first turns of a workload; its kinds come by turns."""
    kinds = [by_kind[kind] for kind in WORKLOADS[workload]]
    return list(chain.from_iterable(zip(*kinds, strict=False)))[:number]


def _workloads(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise SystemExit(f"--workload {unknown[0]!r}: expected some of {', '.join(WORKLOADS)}")
    return names


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _loads(text: str) -> list[int]:
    numbers = [_at_least_one(number) for number in text.split(",") if number]
    if not numbers or max(numbers) > max(LOADS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 1 to {max(LOADS)}")
    return numbers


if __name__ == "__main__":
    main()
