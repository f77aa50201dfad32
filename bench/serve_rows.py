"""Measurements of a server, on the screen and in docs/numbers.md."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

Cells = list[str]
Part = tuple[str, Cells, list[Cells]]  # title, head, rows

AT_ONCE: Final = [
    "turn",
    "agents",
    "server",
    "mode",
    "tokens/s",
    "first ms p50",
    "p99",
    "ms/token",
    "answers",
]
SCALING: Final = ["turn", "server and mode", "all agents : one, tokens/s"]
AGAINST: Final = ["turn", "agents", "ours", "fastest of llama.cpp's", "ratio of tokens/s"]
TURNS: Final = ["server", "mode", "tokens", "unseen, first ms", "turn n+1, first ms", "share", "n"]
COST: Final = [
    "mode",
    "engine ms/token",
    "server ms/token",
    "ratio",
    "of means",
    "whole answer",
    "texts differ",
]
SOAK: Final = ["figure", "value"]


def parts(result: Mapping[str, Any]) -> Iterator[Part]:
    if agents := result.get("agents"):
        yield "agents at once", AT_ONCE, [_at_once(row) for row in agents["rows"]]
        yield "all agents against one", SCALING, [[r["turn"], r["way"], spread(r)] for r in agents["scaling"]]
        if agents["against"]:
            yield "against llama.cpp's server", AGAINST, [_against(row) for row in agents["against"]]
    if turns := result.get("turns"):
        yield "turn n+1 of a conversation", TURNS, [_turn(row) for row in turns]
    if cost := result.get("cost"):
        yield "the server over the bare engine, one stream", COST, [_cost(row) for row in cost]


def _at_once(row: Mapping[str, Any]) -> Cells:
    waits = [f"{row[key]:.0f}" for key in ("ttft_p50_ms", "ttft_p99_ms")]
    who = [row["turn"], str(row["agents"]), row["system"], row["mode"]]
    return [*who, spread(row["tokens_per_s"], 1), *waits, f"{row['tpot_ms']:.1f}", str(row["answers"])]


def _against(row: Mapping[str, Any]) -> Cells:
    return [row["turn"], str(row["agents"]), row["way"], row["peer"], spread(row)]


def _turn(row: Mapping[str, Any]) -> Cells:
    waits = [spread(row[key], 0) for key in ("cold_ms", "next_ms")]
    who = [row["system"], row["mode"], str(row["prompt_tokens"])]
    return [*who, *waits, spread(row["share"], 3), str(row["repeats"])]


def _cost(row: Mapping[str, Any]) -> Cells:
    times = [spread(row[key]) for key in ("engine_ms_per_token", "server_ms_per_token")]
    ratios = [spread(row["ratio"], 3), f"{row['ratio_of_means']:.3f}", spread(row["whole_answer_ratio"], 3)]
    return [row["mode"], *times, *ratios, f"{row['differing_texts']} of {row['prompts']}"]


def spread(found: Mapping[str, float], digits: int = 2) -> str:
    low, high = (f"{found[key]:.{digits}f}" for key in ("low", "high"))
    return f"{found['median']:.{digits}f} ({low} to {high})"


def soak_parts(result: Mapping[str, Any]) -> Iterator[Part]:
    yield "soak", SOAK, [[name, str(value)] for name, value in result["figures"].items()]


def tables(result: Mapping[str, Any]) -> list[Table]:
    found = []
    for title, head, rows in [*parts(result), *(soak_parts(result) if "figures" in result else ())]:
        shown = Table(*head, title=f"{title}, {result['machine']['model']}")
        for row in rows:
            shown.add_row(*row)
        found.append(shown)
    return found


def page(made: Sequence[Part]) -> list[str]:
    """The tables in Markdown."""
    lines: list[str] = []
    for title, head, rows in made:
        lines += [f"### {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines.append("")
    return lines
