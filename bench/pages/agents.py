"""The table in docs/agents.md: what each habit is worth."""

from pathlib import Path
from typing import Final

from bench import results_folder
from bench.runs import effects
from bench.table import Table

PATH: Final = Path(__file__).parent.parent.parent / "docs" / "agents.md"
BEGIN: Final = "<!-- agents: written by `python -m bench pages` from bench/results -->"
END: Final = "<!-- /agents -->"


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


def update() -> None:
    text = PATH.read_text()
    PATH.write_text(text[: text.index(BEGIN)] + section() + text[text.index(END) + len(END) :])
