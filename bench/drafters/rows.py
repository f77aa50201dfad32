"""From single answers to the table of drafters: on the screen and in docs/numbers.md."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from bench.drafters.arms import PLAIN, Arm, Stock
from bench.drafters.runs import Outcome, Sample
from bench.drafters.turns import AGENTS, CHAT
from bench.spread import Spread
from bench.table import Column, Table, number, spread

Row = dict[str, Any]
Key = tuple[str, float, str]  # prompts, temperature, drafters

KEYS: Final = ("prompts", "T", "drafters")
FIGURES: Final = (
    Column("tokens per pass", lambda r: number(r["tokens_per_pass"])),
    Column("planned", lambda r: number(r["tokens_per_pass_planned"])),
    Column("draft cost", lambda r: number(r["draft_cost"])),
    Column("other cost", lambda r: number(r["other_cost"])),
    Column("x plain", lambda r: spread(r["times_plain"])),
    Column("MB", lambda r: number(r["memory_mb"], 0)),
    Column("= plain", lambda r: _same(r)),
)


def rows(outcome: Outcome, arms: Sequence[Arm], stock: Stock, temperatures: Sequence[float]) -> list[Row]:
    """One for each kind of turn, temperature and drafter that has answers there."""
    found = []
    for kind in (AGENTS, CHAT):
        for temperature in temperatures:
            here = [s for s in outcome.samples if s.kind == kind and s.lane.temperature == temperature]
            plain = {s.moment: s for s in here if s.lane.arm.name == PLAIN and not s.lane.planned}
            for arm in arms:
                mine = [s for s in here if s.lane.arm == arm]
                if mine:
                    found.append(_row(arm, mine, plain) | {"memory_mb": round(stock.memory(arm), 1)})
    return found


def _row(arm: Arm, mine: Sequence[Sample], plain: Mapping[tuple[int, str, float], Sample]) -> Row:
    fixed = [s for s in mine if not s.lane.planned]
    planned = [s for s in mine if s.lane.planned]
    beside = [plain[s.moment] for s in fixed]
    drafts, passes = _sum(fixed, "drafts"), _sum(fixed, "passes")
    pass_us = _sum(beside, "target_us") / (_sum(beside, "passes") or 1.0)
    same = [s.text == plain[s.moment].text for s in mine]
    return {
        "prompts": mine[0].kind,
        "temperature": mine[0].lane.temperature,
        "drafters": arm.name,
        "turns": len({s.turn for s in mine}),
        "tokens": int(_sum(planned, "tokens")),
        "tokens_per_pass": _over(fixed, "tokens", "passes"),
        "rows_per_pass": _over(fixed, "rows", "passes"),
        "tokens_per_pass_planned": _over(planned, "tokens", "passes"),
        "draft_cost": round(_sum(fixed, "draft_us") / drafts / pass_us, 3) if drafts and pass_us else None,
        "other_cost": round((_other_us(fixed) - _other_us(beside)) / pass_us, 3)
        if passes and pass_us
        else None,
        "ms_per_token": _scaled(_over(planned, "seconds", "tokens", digits=7)),
        "times_plain": _times(planned, plain),
        "times_plain_fixed": _times(fixed, plain) if arm.name != PLAIN else None,
        "equal": sum(same),
        "compared": len(same),
    }


def _times(mine: Sequence[Sample], plain: Mapping[tuple[int, str, float], Sample]) -> dict[str, float] | None:
    """How many times as fast as plain decoding of the same turns, for each repeat: their spread."""
    ratios = []
    for repeat in sorted({s.repeat for s in mine}):
        ours = [s for s in mine if s.repeat == repeat]
        a, b = _per_token([plain[s.moment] for s in ours]), _per_token(ours)
        if a and b:
            ratios.append(a / b)
    return {k: round(v, 3) for k, v in asdict(Spread.of(ratios)).items()} if ratios else None


def _other_us(samples: Sequence[Sample]) -> float:
    """The part of a pass outside drafting and the target: choosing tokens, and what drafters learn."""
    whole = 1e6 * _sum(samples, "seconds") - _sum(samples, "draft_us") - _sum(samples, "target_us")
    return whole / (_sum(samples, "passes") or 1.0)


def _per_token(samples: Iterable[Sample]) -> float:
    found = list(samples)
    tokens = _sum(found, "tokens")
    return _sum(found, "seconds") / tokens if tokens else 0.0


def _sum(samples: Iterable[Sample], name: str) -> float:
    return float(sum(getattr(s.figures, name) for s in samples))


def _over(samples: Sequence[Sample], above: str, below: str, digits: int = 3) -> float | None:
    number = _sum(samples, below)
    return round(_sum(samples, above) / number, digits) if number else None


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def cells(row: Row | None) -> list[str]:
    return [column.cell(row) if row else "-" for column in FIGURES]


def _same(row: Mapping[str, Any]) -> str:
    differ = row["compared"] - row["equal"]
    return f"NO: {differ} of {row['compared']} differ" if differ else "yes"


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each drafter; the figures of each machine stand side by side."""
    machines = [machine_name(result) for result in results]
    several = len(results) > 1
    names = [column.title for column in FIGURES]
    head = [*KEYS, *(f"{m}: {name}" if several else name for m in machines for name in names)]
    by_key = [{_key(row): row for row in result["rows"]} for result in results]
    keys = sorted(dict.fromkeys(key for found in by_key for key in found), key=_group)
    rows = [[k[0], f"{k[1]:g}", k[2], *(c for f in by_key for c in cells(f.get(k)))] for k in keys]
    return Table(head, rows)


def machine_name(result: Mapping[str, Any]) -> str:
    """Where it was measured, in a word or two."""
    machine = result["machine"]
    return str(machine["gpu"]) if machine["device"] == "cuda" else "CPU"


def _key(row: Row) -> Key:
    return row["prompts"], row["temperature"], row["drafters"]


def _group(key: Key) -> tuple[str, float]:
    """Within it, the order of the lines stays."""
    return key[:2]


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Which drafters pay: those whose every repeat is faster than plain decoding ever was than itself."""
    if result["settings"]["repeats"] < 2:
        return ["One repeat only, which cannot tell a drafter's gain from noise."]
    timed = [row for row in result["rows"] if row["times_plain"]]
    noise = {_key(row)[:2]: row["times_plain"]["high"] for row in timed if row["drafters"] == PLAIN}
    wins: dict[str, list[bool]] = {}
    for row in timed:
        if row["drafters"] != PLAIN:
            won = row["times_plain"]["low"] > max(1.0, noise.get(_key(row)[:2], 1.0))
            wins.setdefault(row["drafters"], []).append(won)
    rules: dict[str, Callable[[list[bool]], bool]] = {
        "Faster than plain decoding everywhere": all,
        "Faster somewhere": lambda won: any(won) and not all(won),
        "Faster nowhere, so not worth using here": lambda won: not any(won),
    }
    groups = {text: [n for n, won in wins.items() if rule(won)] for text, rule in rules.items()}
    return [f"{text}: {', '.join(f'`{n}`' for n in names)}." for text, names in groups.items() if names]


def section(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section of one model in docs/numbers.md."""
    first, *others = comparable(results)
    lines = [f"## drafters: {results[0]['machine']['model']}", "", *_measured(first), NOTES, ""]
    return [*lines, *_verdicts(first), *(line for o in others for line in [*_measured(o), *_verdicts(o)])]


def comparable(results: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of one table: the first run of each machine. A later one had other turns."""
    first: dict[str, Mapping[str, Any]] = {}
    others = [[result] for result in results if first.setdefault(machine_name(result), result) is not result]
    return [list(first.values()), *others]


def _measured(results: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for result in results:
        m, settings = result["machine"], result["settings"]
        lines += [
            f"{machine_name(result)}: `{result['command']}`, {m['date']}, commit {m['commit']}, {m['cpu']}, "
            f"{m['cores']} cores, {m['where']}. {settings['turns']} turns, {settings['repeats']} repeats, "
            f"answers of at most {settings['max_tokens']} tokens; drafts of {settings['length']}, or a tree "
            f"{settings['width']} wide.",
            "",
        ]
    return [*lines, *table(results).markdown()]


def _verdicts(results: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for result in results:
        lines += [f"- {machine_name(result)}: {line}" for line in verdicts(result)]
        lines += [f"- {machine_name(result)}: left out: {reason}" for reason in result["left_out"]]
    return [*lines, ""]


NOTES: Final = (
    "Tokens per pass: with a fixed number of guesses in every pass; planned: with the number that the "
    "controller plans, which is what x plain is measured with. Draft cost: the time of a whole draft, as a "
    "share of a plain pass; other cost: what a pass takes besides the target and the draft, beyond what it "
    "takes in plain decoding, as the same share: more tokens to choose, and what the drafter learns from "
    "them. x plain: how many times as fast as plain decoding in the same run, from prompts that are in the "
    "cache to the last token: the median, lowest and highest of the repeats; `none` is plain decoding "
    "against itself: the noise, beyond which a drafter must be to count as faster. MB: held after a first "
    "short answer, caches included, learned text not. = plain: the token ids of every answer, fixed and "
    "planned, against those of plain decoding with the same seed, one sequence at a time after the same "
    "cached prompt, which the [contract](../../docs/lossless.md) promises to be equal on a CPU and on "
    "a GPU. Agents: a call is required where one was recorded. Each drafter learns from the turns before; in "
    "each repeat it begins anew."
)


def text(results: Sequence[Mapping[str, Any]]) -> str:
    """For the screen."""
    return "\n\n".join(_screen(together) for together in comparable(results))


def _screen(results: Sequence[Mapping[str, Any]]) -> str:
    made = table(results)
    rows = [made.head, *made.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    said = [f"{machine_name(result)}: {line}" for result in results for line in verdicts(result)]
    left = [
        f"{machine_name(result)}: left out: {reason}" for result in results for reason in result["left_out"]
    ]
    return "\n".join(line.rstrip() for line in [*lines, "", *said, *left])
