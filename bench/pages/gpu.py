"""The tables of `python -m bench.gpu`: passes against the bandwidth floor, batches, rounds, and the peers."""

from collections.abc import Iterable
from typing import Any

from bench.results_folder import Result
from bench.table import Table, number

Lines = list[str]
Rows = list[dict[str, Any]]


def of_part(result: Result, part: str) -> Rows:
    return [row for row in result["rows"] if row["part"] == part]


def passes(result: Result, contexts: Iterable[int] | None = None) -> Lines:
    """Milliseconds of a pass by rows; in brackets the share of the bandwidth floor."""
    rows = of_part(result, "passes")
    counts = sorted({row["rows"] for row in rows})
    cells: dict[tuple[str, str, int], dict[int, str]] = {}
    floors: dict[tuple[str, str, int], float] = {}
    for row in rows:
        key = (row["shape"], row["kind"], row["context"])
        cells.setdefault(key, {})[row["rows"]] = f"{number(row['ms'])} ({row['percent']:.0f} %)"
        floors[key] = row["floor_ms"]
    wanted = None if contexts is None else set(contexts)
    lines = [
        [shape, kind, f"{context:,}", number(floors[shape, kind, context]), *(found[n] for n in counts)]
        for (shape, kind, context), found in cells.items()
        if wanted is None or context in wanted
    ]
    head = ["shape", "weights", "context", "floor, ms", *(f"{n} rows" if n > 1 else "1 row" for n in counts)]
    return Table(head, lines).markdown()


def batches(result: Result) -> Lines:
    rows = of_part(result, "batches")
    counts = sorted({row["sequences"] for row in rows})
    found = {(row["shape"], row["rows"], row["sequences"]): row["ms"] for row in rows}
    kinds = dict.fromkeys((row["shape"], row["rows"]) for row in rows)
    lines = [[shape, str(n), *(number(found[shape, n, count]) for count in counts)] for shape, n in kinds]
    return Table(
        ["shape", "rows of each", *(f"{n} sequences" if n > 1 else "1 sequence" for n in counts)], lines
    ).markdown()


def rounds(result: Result) -> Lines:
    """SmolLM2 itself, one request at a time."""
    lines = [
        [
            f"paceline, {row['drafters']}",
            str(row["temperature"]),
            number(row["tokens_per_s"], 0),
            number(row["tokens_per_pass"]),
            row["equal"],
        ]
        for row in of_part(result, "rounds")
    ]
    lines += [
        [
            f"Transformers, {row['way']}",
            "0.0",
            number(row["tokens_per_s"], 0),
            "",
            f"{row['texts_equal']} texts",
        ]
        for row in of_part(result, "transformers")
    ]
    head = ["engine, drafters", "temperature", "tokens/s", "tokens per pass", "tokens = plain"]
    return Table(head, lines).markdown()


def section(result: Result) -> Lines:
    machine = result["machine"]
    return [
        f"## CUDA kernels: {machine['gpu']}",
        "",
        f"`{result['command']}`, {machine['date']}, commit {machine['commit']}, torch {machine['torch']}, "
        f"copies at {machine['copy_tb_s']:.2f} TB/s. 135m has SmolLM2's weights, the others random ones.",
        "",
        "A pass, ms, and its share of the floor (the bytes it must read over the bandwidth):",
        "",
        *passes(result),
        "Several sequences of 1,000 to 1,400 tokens in one call, ms:",
        "",
        *batches(result),
        "Decoding after recorded agent prompts, Python included:",
        "",
        *rounds(result),
    ]
