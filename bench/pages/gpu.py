"""The tables of `python -m bench.gpu`: passes against the bandwidth floor, batches, rounds, and the peers."""

from collections.abc import Iterable
from typing import Any, Final

from bench.results_folder import Result
from bench.table import Table, number

Lines = list[str]
Rows = list[dict[str, Any]]


def of_part(result: Result, part: str) -> Rows:
    return [row for row in result["rows"] if row["part"] == part]


def passes(
    result: Result, contexts: Iterable[int] | None = None, kinds: Iterable[str] | None = None
) -> Lines:
    """Milliseconds of a pass by rows; in brackets the share of the bandwidth floor. kinds: None: all."""
    chosen = None if kinds is None else set(kinds)
    rows = [row for row in of_part(result, "passes") if chosen is None or row["kind"] in chosen]
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
    """Some rows are of a later call than the others."""
    rows, commit = of_part(result, "batches"), result["machine"]["commit"]
    counts = sorted({row["sequences"] for row in rows})
    found: dict[tuple[str, str, str, int], dict[int, str]] = {}
    for row in rows:
        mode = ", not deterministic" if row.get("deterministic") is False else ""
        kind = row.get("commit", commit), row["shape"] + mode, row["context"], row["rows"]
        found.setdefault(kind, {})[row["sequences"]] = number(row["ms"])
    lines = [
        [shape, context, str(n), *(by_count.get(count, "") for count in counts), at]
        for (at, shape, context, n), by_count in found.items()
    ]
    sequences = (f"{n} sequences" if n > 1 else "1 sequence" for n in counts)
    return Table(["shape", "context", "rows of each", *sequences, "commit"], lines).markdown()


# Parts that ran recorded turns of agents, each in one call with everything in it.
SIDE_BY_SIDE: Final = {
    "rounds": "alone",
    "trained agent": "with the trained drafter",
    "trained chat": "chats, with the trained drafter",
    "beside": "beside Transformers",
    "compiled": "alone",
    "beside vllm": "beside vLLM",
}


def rounds(result: Result, short: bool = False) -> Lines:
    """SmolLM2 itself, one request at a time: the median of the repeats, and their range.

    short: greedy alone, without trees and trained drafters.
    """
    lines = [
        [
            f"{row['turns']} of {row['tokens']}, {which}",
            row["engine"],
            *([] if short else [str(row["temperature"])]),
            f"{number(row['tokens_per_s'], 0)} ({number(row['slowest'], 0)} to {number(row['fastest'], 0)})",
            number(row["tokens_per_pass"]) if row.get("tokens_per_pass") else "",
            row.get("equal", ""),
        ]
        for part, which in SIDE_BY_SIDE.items()
        for row in of_part(result, part)
        if not (short and (row["temperature"] > 0 or "tree" in row["engine"] or part.startswith("trained")))
    ]
    temperature = [] if short else ["temperature"]
    head = [
        "turns of tokens",
        "engine",
        *temperature,
        "tokens/s",
        "tokens per pass",
        "tokens = its own plain",
    ]
    return Table(head, lines).markdown()


def heads(result: Result) -> Lines:
    """A block head's whole draft beside a pass of its target."""
    lines = [
        [
            row["shape"],
            f"{row['draft_vocab']:,}",
            str(row["temperature"]),
            number(row["pass_ms"]),
            number(row["draft_ms"]),
            f"{row['percent']:.1f} %",
            number(row["call_ms"]),
        ]
        for row in of_part(result, "heads")
    ]
    head = [
        "target",
        "draft vocabulary",
        "temperature",
        "pass",
        "draft",
        "share of the pass",
        "with the host",
    ]
    return Table(head, lines).markdown()


def vllm(result: Result) -> Lines:
    rows = of_part(result, "vllm sequences")
    counts = sorted({row["sequences"] for row in rows})
    found = {(row["shape"], row["sequences"]): row["ms"] for row in rows}
    shapes = dict.fromkeys(row["shape"] for row in rows)
    lines = [[shape, *(number(found[shape, count]) for count in counts)] for shape in shapes]
    head = ["shape", *(f"{n} sequences" if n > 1 else "1 sequence" for n in counts)]
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
        "A block head's draft in a graph, ms: 4 hidden states read after 600 tokens, block and chain of 8:",
        "",
        *heads(result),
        "Several sequences in one call, ms:",
        "",
        *batches(result),
        "vLLM 0.26.0, a step, ms: sequences of 300 to 556 tokens, random weights, its host included (the "
        "median of three, another call; the mean context is 436 tokens):",
        "",
        *vllm(result),
        "Decoding in recorded turns of agents, Python included. Rows with the same first column had the same "
        "prompts and lengths; only those can be compared. Those beside vLLM or Transformers and batches "
        "are of an earlier call, vLLM in a process of its own:",
        "",
        *rounds(result),
        "The host's part of a round of SmolLM2, µs:",
        "",
        *host(result),
    ]
