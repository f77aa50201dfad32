"""Results as a table on the screen, in docs/numbers.md and in the README."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from bench.rows import AGENT_TURNS, OURS, Row

RESULTS: Final = Path(__file__).parent / "results"
HEAD: Final = (
    "workload",
    "T",
    "system",
    "mode",
    "tokens/s",
    "ms/token",
    "first ms",
    "per pass",
    "peak MB",
    "n",
    "= plain",
    "x best plain peer",
    "x best guessing peer",
)
BEGIN: Final = "<!-- peers: from bench/results, written by `python -m bench --write` -->"
END: Final = "<!-- /peers -->"


def cells(row: Row) -> list[str]:
    if row["n"] == 0:
        measured = [row.get("error") or "no time for it", *[""] * (len(HEAD) - 5)]
        return [row["workload"], f"{row['temperature']:g}", row["system"], row["mode"], *measured]
    return [
        row["workload"],
        f"{row['temperature']:g}",
        row["system"],
        row["mode"],
        number(row["tokens_per_s"], 1),
        f"{number(row['tpot_ms'], 1)} ({number(row['tpot_ms_low'], 1)} to {number(row['tpot_ms_high'], 1)})",
        number(row["ttft_ms"], 0),
        number(row["tokens_per_pass"], 2),
        number(row["peak_mb"], 0),
        str(row["n"]),
        number(row["identical_to_plain"], 2),
        faster(row["vs_plain_peer"]),
        faster(row["vs_speculative_peer"]),
    ]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def faster(against: dict[str, Any] | None) -> str:
    if not against:
        return "-"
    found = against["tpot"]
    return f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(*HEAD, title=title)
    before = None
    for row in rows:
        here = row["workload"], row["temperature"]
        if before not in (None, here):
            shown.add_section()
        shown.add_row(*cells(row))
        before = here
    return shown


def results() -> list[dict[str, Any]]:
    """The kept comparisons, one for each model."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("peers-*.json"))]


def page(result: dict[str, Any]) -> list[str]:
    """The lines of a comparison in docs/numbers.md."""
    machine, floor = result["machine"], result["floor"]
    lines = [f"## against peers: {machine['model']}", ""]
    lines += [f"`{result['command']}`, {machine['date']}, commit {machine['commit']}, {machine['cpu']}", ""]
    lines += [
        f"Memory is read at {floor['gb_per_s']} GB/s here: {floor['weights_mb']} MB of weights take at least "
        f"{floor['floor_ms']} ms a token. Prompts of at most {result['settings']['max_prompt']} tokens, "
        f"{result['settings']['shortened']} of {result['settings']['prompts']} shortened to fit; answers of "
        f"at most {result['settings']['max_tokens']} tokens. ms/token is after the first; a ratio is how "
        "many times as fast, over the same prompts in the same round, with the lowest and highest pair.",
        "",
    ]
    lines += [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [f"| {' | '.join(cells(row))} |" for row in result["rows"]]
    lines += ["", *(f"- left out: {reason}" for reason in result["left_out"])]
    lines += [f"- {name}: {version}" for name, version in result["versions"].items()]
    return [*lines, ""]


def readme(kept: Sequence[dict[str, Any]]) -> str:
    """Temperature 0, all agents' turns together: ours, and the best of the others."""
    lines = [BEGIN, "| agent turns, temperature 0 | ms per token | tokens per pass | x best plain peer |"]
    lines.append("|---|---|---|---|")
    for result in kept:
        rows = [r for r in result["rows"] if r["temperature"] == 0 and r["n"]]
        pooled = [r for r in rows if r["workload"] == AGENT_TURNS] or rows
        for row in _leaders(pooled):
            name = f"{result['machine']['model']}, {row['system']} {row['mode']}"
            shown = number(row["tpot_ms"], 1), number(row["tokens_per_pass"], 2), faster(row["vs_plain_peer"])
            lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join([*lines, END])


def _leaders(rows: Sequence[Row]) -> list[Row]:
    ours = [r for r in rows if r["system"] == OURS]
    others = [r for r in rows if r["system"] != OURS and r["tpot_ms"]]
    plain = [r for r in others if r["mode"].startswith("plain")]
    guessing = [r for r in others if not r["mode"].startswith("plain")]
    best = [min(group, key=lambda r: r["tpot_ms"]) for group in (plain, guessing) if group]
    return [*ours, *best]


def write(result: dict[str, Any], name: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """One row a line: a JSON list, or JSON lines if the name ends in .jsonl."""
    texts = [json.dumps(row) for row in rows]
    as_lines = path.suffix == ".jsonl"
    path.write_text("\n".join(texts) + "\n" if as_lines else "[\n" + ",\n".join(texts) + "\n]\n")
