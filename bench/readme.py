"""The README's table of numbers."""

from pathlib import Path
from typing import Any

BEGIN = "<!-- numbers: from bench/results/cpu.json, written by `python -m bench.run --write` -->"
END = "<!-- /numbers -->"


def section(facts: dict[str, Any], measured: dict[str, dict[str, Any]]) -> str:
    agent, plain, cost = measured["agent workflow"], measured["plain decoding"], measured["engine overhead"]
    text = "identical" if agent["identical_text"] else "DIFFERENT"
    rows = [
        ("tool-calling agent, plain", f"{agent['plain_s']} s", ""),
        (
            "tool-calling agent, speculative",
            f"{agent['speculative_s']} s",
            f"{agent['tokens_per_pass']} tokens per pass, {agent['ratio']} x faster, text {text}",
        ),
        ("plain decoding, paceline", f"{plain['paceline_ms']} ms/token", ""),
        ("the same, Transformers", f"{plain['transformers_ms']} ms/token", f"{plain['ratio']} x slower"),
        ("a round outside the forward pass", f"{cost['median_ms']} ms", ""),
    ]
    head = f"| {facts['model']}, float32, {facts['cores']} CPU cores, {facts['date']} | | |"
    return "\n".join([BEGIN, head, "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), END])


def update(page: Path, new: str, begin: str = BEGIN, end: str = END) -> None:
    """Puts a section in its place; one that has none yet follows the first table of numbers."""
    text = page.read_text()
    if begin not in text:
        at = text.index(END) + len(END)
        text = f"{text[:at]}\n\n{begin}\n{end}{text[at:]}"
    page.write_text(text[: text.index(begin)] + new + text[text.index(end) + len(end) :])
