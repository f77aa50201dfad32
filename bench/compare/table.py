"""The table of `python -m bench`: a line for each workload, temperature, system and mode."""

from collections.abc import Sequence
from typing import Any, Final

from bench.compare.rows import Row
from bench.peers.systems import precision
from bench.table import Column, Table, number

COLUMNS: Final = (
    Column("workload", "workload"),
    Column("T", lambda r: f"{r['temperature']:g}"),
    Column("system", "system"),
    Column("mode", "mode"),
    Column("tokens/s", lambda r: number(r["tokens_per_s"], 1)),
    Column(
        "ms/token",
        lambda r: (
            f"{number(r['tpot_ms'], 1)} ({number(r['tpot_ms_low'], 1)} to {number(r['tpot_ms_high'], 1)})"
        ),
    ),
    Column("first ms", lambda r: number(r["ttft_ms"], 0)),
    Column("tokens per pass", lambda r: number(r["tokens_per_pass"])),
    Column("peak MB", lambda r: number(r["peak_mb"], 0)),
    Column("n", "n"),
    Column("= plain", lambda r: number(r["identical_to_plain"])),
    Column("x best plain peer", lambda r: faster(r["vs_plain_peer"])),
    Column("x best drafting peer", lambda r: faster(r["vs_speculative_peer"])),
)


def table(rows: Sequence[Row], title: str = "") -> Table:
    """Rows without an answer are left out."""
    return Table.of(COLUMNS, [row for row in rows if row["n"]], title)


def faster(against: dict[str, Any] | None) -> str:
    if not against:
        return "-"
    found = against["tpot"]
    return f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def section(result: dict[str, Any]) -> list[str]:
    """The table of one model, in bench/results/README.md."""
    machine, floor, settings = result["machine"], result["floor"], result["settings"]
    lines = [f"## peers: {machine['model']}", ""]
    lines += [f"`{result['command']}`, {machine['date']}, commit {machine['commit']}, {machine['cpu']}", ""]
    lines += [
        f"Memory bandwidth is {floor['gb_per_s']} GB/s, so reading {floor['weights_mb']} MB of weights takes "
        f"at least {floor['floor_ms']} ms a token. Prompts have at most {settings['max_prompt']} tokens "
        f"({settings['shortened']} of {settings['prompts']} were shortened), answers at most "
        f"{settings['max_tokens']}. ms/token counts tokens after the first. A ratio is how many times as "
        "fast, over the same prompts in the same round, with the lowest and the highest pair.",
        "",
    ]
    lines += table(result["rows"]).markdown()
    empty = [f"{r['workload']} at {r['temperature']:g}" for r in result["rows"] if not r["n"]]
    if empty:
        lines.append(f"- not measured, for lack of time: {len(empty)} of {len(result['rows'])} rows")
    lines += [f"- left out: {reason}" for reason in result["left_out"]]
    for name, version in result["versions"].items():
        lines.append(f"- {name}: {version}; {precision(name.partition(' ')[0], result)}")
    return [*lines, ""]
