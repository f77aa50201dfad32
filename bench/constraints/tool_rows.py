"""From single answers with tool calls to rows of results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from bench.constraints.recorded_calls import Item, matches, matches_but_for_optional, valid
from bench.spread import Spread
from bench.table import Column, number
from paceline.text import ToolCall

Found = Sequence[tuple[Item, Mapping[str, "Answer"]]]

COLUMNS: Final = (
    Column("workload", "workload"),
    Column("drafters", "drafters"),
    Column("n", "n"),
    Column("tokens per pass", lambda r: number(r["tokens_per_pass"])),
    Column("pooled", lambda r: number(r["tokens_per_pass_pooled"])),
    Column("by grammar", lambda r: number(r["from_grammar"])),
    Column("forced", lambda r: number(r["forced"])),
    Column("grammar accepted", lambda r: number(r["grammar_accepted"])),
    Column("suffix accepted", lambda r: number(r["suffix_accepted"])),
    Column("ms/token", lambda r: number(r["ms_per_token"], 1)),
    Column("x plain", lambda r: _faster(r)),
    Column("= plain", lambda r: number(r["identical_to_plain"], 3)),
    Column("calls = plain", lambda r: number(r["same_calls_as_plain"], 3)),
    Column("valid", lambda r: number(r["valid"], 3)),
    Column("cut", "cut"),
    Column("as recorded", lambda r: number(r["as_recorded"], 3)),
    Column("except optional", lambda r: number(r["as_recorded_but_for_optional"], 3)),
    Column("in any format", lambda r: number(r["as_recorded_in_any_format"], 3)),
)


@dataclass
class Answer:
    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    passes: int  # that committed a token
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    seconds: float  # after the first pass that committed a token
    timed_tokens: int  # that came in that time
    complete: bool  # the model ended it
    calls: tuple[ToolCall, ...]
    anyhow: tuple[ToolCall, ...]  # the calls, also those not in the model's own format
    forced: int = 0  # positions where the grammar left no choice; known for plain answers

    @property
    def ms_per_token(self) -> float | None:
        return 1000 * self.seconds / self.timed_tokens if self.timed_tokens > 0 else None


def rows(workload: str, found: Found, plain: str = "none") -> list[dict[str, Any]]:
    """One for each list of drafters."""
    names = list(found[0][1]) if found else []
    return [_row(workload, name, found, plain) for name in sorted(names, key=_ORDER.index)]


_ORDER: Final = ("unconstrained", "none", "suffix", "grammar", "grammar,suffix")


def _row(workload: str, name: str, found: Found, plain: str) -> dict[str, Any]:
    answers = [answers[name] for _, answers in found]
    plains = [answers[plain] for _, answers in found]
    tokens = sum(len(a.tokens) for a in answers)
    complete = [(item, answers[name]) for item, answers in found if answers[name].complete]
    pairs = [
        (p.ms_per_token, a.ms_per_token)
        for a, p in zip(answers, plains, strict=True)
        if a.ms_per_token and p.ms_per_token
    ]
    return {
        "workload": workload,
        "drafters": name,
        "n": len(answers),
        "tokens": tokens,
        "tokens_per_pass": fmean(len(a.tokens) / a.passes for a in answers),
        "tokens_per_pass_pooled": tokens / sum(a.passes for a in answers),
        "from_grammar": sum(a.sources.count("grammar") for a in answers) / tokens,
        "forced": sum(p.forced for p in plains) / sum(len(p.tokens) for p in plains),
        "grammar_accepted": _acceptance(answers, "grammar"),
        "suffix_accepted": _acceptance(answers, "suffix"),
        "ms_per_token": _pooled_ms(answers),
        "times_plain": asdict(Spread.of([p / a for p, a in pairs if p and a])) if pairs else None,
        "times_plain_pooled": (_pooled_ms(plains) or 0) / (_pooled_ms(answers) or 1),
        "identical_to_plain": fmean(a.tokens == p.tokens for a, p in zip(answers, plains, strict=True)),
        "same_calls_as_plain": fmean(a.calls == p.calls for a, p in zip(answers, plains, strict=True)),
        "valid": fmean(bool(a.calls) and valid(i, a.calls) for i, a in complete) if complete else None,
        "cut": len(answers) - len(complete),
        "as_recorded": fmean(matches(answers[name].calls, item.reference) for item, answers in found),
        "as_recorded_but_for_optional": fmean(
            matches_but_for_optional(answers[name].calls, item.reference, item.tools)
            for item, answers in found
        ),
        "as_recorded_in_any_format": fmean(
            matches(answers[name].anyhow, item.reference) for item, answers in found
        ),
    }


def _acceptance(answers: Sequence[Answer], source: str) -> float | None:
    drafted = sum(n for a in answers for name, n in a.drafted.items() if name.startswith(source))
    accepted = sum(n for a in answers for name, n in a.accepted.items() if name.startswith(source))
    return accepted / drafted if drafted else None


def _pooled_ms(answers: Sequence[Answer]) -> float | None:
    tokens = sum(a.timed_tokens for a in answers)
    return 1000 * sum(a.seconds for a in answers) / tokens if tokens else None


def _faster(row: Mapping[str, Any]) -> str:
    low_high = row["times_plain"]
    shown = f" ({low_high['low']:.2f} to {low_high['high']:.2f})" if low_high else ""
    return f"{row['times_plain_pooled']:.2f}{shown}"
