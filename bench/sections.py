"""What docs/numbers.md says of kept results besides paceline's own figures."""

import json
from collections.abc import Callable
from typing import Any, Final

from bench import call_rows, draft_pass, drafter_rows, report, schema_rows, serve_rows

Lines = list[str]


def every() -> Lines:
    """All of them, a section for each kept file."""
    lines: Lines = []
    for kind, write in KINDS.items():
        for path in sorted(report.RESULTS.glob(f"{kind}-*.json")):
            lines += write(json.loads(path.read_text()))
    return lines + drafters()


def drafters() -> Lines:
    """A section for each model, whatever it was called where it was measured: its machines side by side."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(report.RESULTS.glob("drafters-*.json")):
        result = json.loads(path.read_text())
        by_model.setdefault(result["machine"]["fingerprint"], []).append(result)
    return [line for results in by_model.values() for line in drafter_rows.page(results)]


def measured(result: dict[str, Any], title: str) -> Lines:
    machine = result["machine"]
    where = f"{machine['date']}, commit {machine['commit']}, {machine['cpu']}, {machine['cores']} cores"
    return [f"## {title}: {machine['model']}", "", f"`{result['command']}`, {where}", ""]


def passes(result: dict[str, Any]) -> Lines:
    """Milliseconds of each pass; the ratio is llama.cpp's time over paceline's."""
    rows = result["rows"]
    names = [key for key in rows[0] if key not in ("context", "rows", "what", "ratio")]
    head = ["pass", *names, *(f"{name}, x one row" for name in names), "ratio"]
    lines = [*measured(result, "cost of a pass"), _row(head), _row(["---"] * len(head))]
    for row in rows:
        times = [_spread(row[name]) for name in names]
        flat = [f"{row[name]['times_one_row']:.2f}" if "times_one_row" in row[name] else "" for name in names]
        lines.append(_row([row["what"], *times, *flat, _spread(row["ratio"]) if "ratio" in row else ""]))
    floor = result["floor"]
    return [
        *lines,
        "",
        f"Reading the weights once takes {floor['floor_ms']} ms at {floor['gb_per_s']} GB/s.",
        "",
    ]


def draft_passes(result: dict[str, Any]) -> Lines:
    head = list(draft_pass.HEAD)
    lines = [*measured(result, "cost of a draft"), _row(head), _row(["---"] * len(head))]
    return [*lines, *(_row(draft_pass.cells(row)) for row in result["rows"]), "", DRAFT_PASS_NOTES, ""]


DRAFT_PASS_NOTES: Final = (
    "Medians of the rounds of a repeat; spreads over repeats. The drafter's pass fills its block and says "
    "its chain of guesses. The whole draft is all between a token and the next pass of the target: what the "
    "engine and the drafter do in Python, too, which takes the same time whatever the model."
)


def divergence(result: dict[str, Any]) -> Lines:
    head = ["engine", "mean KL", "median KL", "largest KL", "same first choice", "positions"]
    lines = [*measured(result, "divergence from float32"), _row(head), _row(["---"] * len(head))]
    for name, row in result["rows"].items():
        figures = [f"{row[key]:.2e}" for key in ("mean_kl", "median_kl", "max_kl")]
        lines.append(_row([name, *figures, f"{row['same_first_choice']:.3f}", str(row["positions"])]))
    return [*lines, ""]


def tools(result: dict[str, Any]) -> Lines:
    lines = [*measured(result, "tool calls"), _row(list(call_rows.HEAD)), _row(["---"] * len(call_rows.HEAD))]
    lines += [_row(call_rows.cells(row)) for row in result["rows"]]
    masks = result["masks"]
    return [
        *lines,
        "",
        "Temperature 0, tool_choice required; unconstrained: the same prompt, nothing enforced. Each list of "
        "drafters saw the same turns in the same order, with a suffix memory of its own. Passes over prompts "
        "are not counted. As recorded: every argument is the reference's, which counts too few, since the "
        "data has one of several right answers; but for optional: optional arguments may be added.",
        "",
        f"Masks of a round, {masks['positions']} positions at {masks['vocab']:,} tokens: mean "
        f"{masks['mean_ms']} ms, median {masks['p50_ms']} ms, p99 {masks['p99_ms']} ms over "
        f"{masks['rounds']} rounds.",
        "",
    ]


def schemas(result: dict[str, Any]) -> Lines:
    head = list(schema_rows.HEAD)
    lines = [*measured(result, "JSON Schemas"), _row(head), _row(["---"] * len(head))]
    lines += [_row(schema_rows.cells(row)) for row in result["rows"]]
    lines += [
        "",
        "Each accepted schema has two answers, plain and guessed, by the same seed. Why refused:",
        "",
    ]
    lines += [f"- {count}: {reason}" for reason, count in result["reasons"]]
    lines += ["", *(f"- {problem}" for problem in result["problems"])]
    return [*lines, ""]


def serve(result: dict[str, Any]) -> Lines:
    asked = result["settings"]
    return [
        *measured(result, "the server"),
        f"Over HTTP, streaming, times taken by the client; prompts of {asked['context']} tokens, ends of "
        f"recorded agents' turns; answers of exactly {asked['max_tokens']} tokens, temperature 0; as many "
        "slots as agents. A first turn is new to every cache; a next turn is the first, its answer and a "
        "further message. Tokens/s are over the time from the first request to the last token, prompts "
        "included; spreads are over rounds.",
        "",
        *serve_rows.page(list(serve_rows.parts(result))),
    ]


def soak(result: dict[str, Any]) -> Lines:
    lines = [*measured(result, "soak"), *serve_rows.page(list(serve_rows.soak_parts(result)))]
    return [*lines, *(f"- {problem}" for problem in result["problems"]), ""]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


KINDS: Final[dict[str, Callable[[dict[str, Any]], Lines]]] = {
    "peers": report.page,
    "passes": passes,
    "draft_pass": draft_passes,
    "divergence": divergence,
    "tools": tools,
    "schemas": schemas,
    "serve": serve,
    "soak": soak,
}
