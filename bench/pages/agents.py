"""The tables in docs/agents.md: what each habit is worth, and how many tool calls are predicted."""

from pathlib import Path
from typing import Final

from bench import prefetch, results_folder
from bench.runs import effects
from bench.table import Table

PATH: Final = Path(__file__).parent.parent.parent / "docs" / "agents.md"
BEGIN: Final = "<!-- agents: written by `python -m bench pages` from bench/results -->"
END: Final = "<!-- /agents -->"
PREDICTED: Final = "<!-- prefetch: written by `python -m bench pages` from bench/results -->"
PREDICTED_END: Final = "<!-- /prefetch -->"


def section() -> str:
    lines = []
    for result in reversed(results_folder.read("agents")):
        machine = result["machine"]
        lines += [
            f"{machine['model']}, {machine['cpu']}, {machine['cores']} cores, first token, median (lowest to "
            f"highest) of {result['repeats']}, `{result['command']}`, {machine['date']}, commit "
            f"{machine['commit']}:",
            "",
            *Table.of(effects.COLUMNS, result["rows"]).markdown(),
        ]
    return "\n".join([BEGIN, "", *lines, END])


def predicted() -> str:
    lines = []
    for result in results_folder.read("prefetch"):
        lines += [prefetch.about(result), "", *Table.of(prefetch.SHORT, result["rows"]).markdown()]
    return "\n".join([PREDICTED, "", *lines, PREDICTED_END])


def update() -> None:
    PATH.write_text(page(PATH.read_text()))


def page(text: str) -> str:
    """With both sections as the results have them."""
    text = text[: text.index(BEGIN)] + section() + text[text.index(END) + len(END) :]
    after = text[text.index(PREDICTED_END) + len(PREDICTED_END) :]
    return text[: text.index(PREDICTED)] + predicted() + after
