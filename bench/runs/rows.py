"""From runs to rows: whole runs by round, first tokens by turn, tokens from the cache, equal texts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from bench.runs.arms import OURS, PLAIN
from bench.runs.replay import Run, Turn
from bench.spread import Spread
from bench.table import Column, Table, number, spread

Row = dict[str, Any]
Result = Mapping[str, Any]

COLUMNS: Final = (
    Column("caches", "state"),
    Column("server", "arm"),
    Column("whole runs, s", lambda r: spread(r["run_s"], 1)),
    Column("first token of a first turn, ms", lambda r: number(r["first_turn_ms"], 0)),
    Column("of a later turn, ms", lambda r: number(r["later_turn_ms"], 0)),
    Column("before first tokens, s", lambda r: number(r["waiting_s"], 1)),
    Column("ms/token", lambda r: number(r["ms_per_token"], 1)),
    Column("answers' tokens", "tokens"),
    Column("prompt tokens", "prompt_tokens"),
    Column("from the cache", lambda r: f"{100 * r['cached_tokens'] / max(1, r['prompt_tokens']):.0f} %"),
    Column("turns", "turns"),
)
RATIOS: Final = (
    Column("caches", "state"),
    Column("against", "arm"),
    Column("times faster, whole runs", spread),
    Column("single conversations", lambda r: f"{r['worst']:.2f} to {r['best']:.2f}"),
    Column("rounds", "rounds"),
)


def rows(runs: Sequence[Run]) -> list[Row]:
    """One for each state and arm."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.state, run.arm != OURS, run.arm)):
        groups.setdefault((run.state, run.arm), []).append(run)
    return [_row(state, arm, group) for (state, arm), group in groups.items()]


def _row(state: str, arm: str, runs: Sequence[Run]) -> Row:
    rounds = len({run.round for run in runs})
    turns = [turn for run in runs for turn in run.turns]
    later = [turn.first_s for run in runs for turn in run.turns[1:]]
    return {
        "state": state,
        "arm": arm,
        "run_s": asdict(Spread.of(list(totals(runs).values()))),
        "first_turn_ms": 1000 * median(run.setup_s + run.turns[0].first_s for run in runs),
        "later_turn_ms": 1000 * median(later),
        "waiting_s": sum(run.setup_s + sum(turn.first_s for turn in run.turns) for run in runs) / rounds,
        "ms_per_token": _ms_per_token(turns),
        "tokens": round(sum(turn.tokens for turn in turns) / rounds),
        "prompt_tokens": round(sum(turn.prompt_tokens for turn in turns) / rounds),
        "cached_tokens": round(sum(turn.cached_tokens for turn in turns) / rounds),
        "turns": len(turns) // rounds,
        "conversations": len({run.conversation for run in runs}),
        "rounds": rounds,
    }


def _ms_per_token(turns: Iterable[Turn]) -> float | None:
    """After the first piece, of all turns together."""
    timed = [turn for turn in turns if turn.tokens > 1]
    steps = sum(turn.tokens - 1 for turn in timed)
    return 1000 * sum(turn.last_s - turn.first_s for turn in timed) / steps if steps else None


def totals(runs: Iterable[Run]) -> dict[int, float]:
    """Seconds of all conversations, by round."""
    sums: dict[int, float] = {}
    for run in runs:
        sums[run.round] = sums.get(run.round, 0.0) + run.seconds
    return sums


def ratios(runs: Sequence[Run]) -> list[Row]:
    """The time of every other arm over paceline's: by round, and in single conversations."""
    made = []
    for state in dict.fromkeys(run.state for run in runs):
        here = [run for run in runs if run.state == state]
        ours = {(run.round, run.conversation): run for run in here if run.arm == OURS}
        for arm in dict.fromkeys(run.arm for run in here if run.arm != OURS):
            theirs = [run for run in here if run.arm == arm and (run.round, run.conversation) in ours]
            if theirs:
                made.append(_ratio(state, arm, theirs, [ours[r.round, r.conversation] for r in theirs]))
    return made


def _ratio(state: str, arm: str, theirs: Sequence[Run], ours: Sequence[Run]) -> Row:
    above, below = totals(theirs), totals(ours)
    single = [a.seconds / b.seconds for a, b in zip(theirs, ours, strict=True)]
    return {
        "state": state,
        "arm": arm,
        **asdict(Spread.of([above[number] / below[number] for number in above])),
        "worst": min(single),
        "best": max(single),
        "rounds": len(above),
    }


def texts(runs: Sequence[Run]) -> dict[str, Any]:
    """How many of paceline's answers with drafts equal those without, turn by turn, in every round."""
    plain = {run.conversation: run.turns for run in runs if run.arm == PLAIN}
    compared, differing = 0, []
    for run in runs:
        if run.arm != OURS or run.conversation not in plain:
            continue
        for place, (ours, expected) in enumerate(zip(run.turns, plain[run.conversation], strict=True), 1):
            compared += 1
            if ours.answer != expected.answer:
                differing.append(f"{run.conversation}, turn {place}, round {run.round + 1}, {run.state}")
    return {"compared": compared, "equal": compared - len(differing), "differing": differing}


def tables(result: Result) -> list[Table]:
    made = [Table.of(COLUMNS, result["rows"], "whole agent runs")]
    return (
        [*made, Table.of(RATIOS, result["ratios"], "paceline against the others")]
        if result["ratios"]
        else made
    )
