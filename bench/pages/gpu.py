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
        [
            shape,
            kind,
            f"{context:,}",
            number(floors[shape, kind, context]),
            *(found.get(n, "") for n in counts),
        ]
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
    """SmolLM2 itself, one request at a time: the median of the repeats, and their range."""
    lines = [
        [
            row["engine"],
            str(row.get("temperature", 0.0)),
            str(row["turns"]),
            f"{number(row['tokens_per_s'], 0)} ({number(row['slowest'], 0)} to {number(row['fastest'], 0)})",
            number(row["tokens_per_pass"]) if row.get("tokens_per_pass") else "",
            row.get("equal", ""),
        ]
        for part in ("rounds", "beside", "compiled")
        for row in of_part(result, part)
    ]
    head = [
        "engine, drafters",
        "temperature",
        "turns",
        "tokens/s",
        "tokens per pass",
        "tokens = its own plain",
    ]
    return Table(head, lines).markdown()


def host(result: Result) -> Lines:
    """The host's part of a round, in microseconds."""
    lines = [
        [
            row["drafters"],
            number(row["round_us"], 0),
            number(row["pass_us"], 0),
            number(row["between_us"], 0),
            number(row["between_p90_us"], 0),
            number(row["launch_us"], 1),
        ]
        for row in of_part(result, "host")
    ]
    head = ["drafters", "round", "pass", "tokens to next launch, median", "90th percentile", "launch"]
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
        "Decoding in recorded turns of agents, Python included; all have the same prompts, in one process:",
        "",
        *rounds(result),
        "The host's part of a round of SmolLM2, µs:",
        "",
        *host(result),
    ]
