"""The table in docs/models.md: what a pass of a mixture of experts costs by its rows."""

from pathlib import Path
from typing import Final

from bench import results_folder
from bench.own import experts

PATH: Final = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN: Final = "<!-- experts: written by `python -m bench pages` from bench/results -->"
END: Final = "<!-- /experts -->"


def section() -> str:
    lines = []
    for result in results_folder.read("experts"):
        machine = result["machine"]
        lines += [
            *experts.short(result["rows"]).markdown(),
            f"Times the pass of one row, fastest of {result['repeats']}: `{result['command']}`, "
            f"{machine['date']}, commit {machine['commit']}, {machine['cpu']}, {machine['cores']} cores.",
            "",
        ]
    return "\n".join([BEGIN, "", *lines, END])


def update() -> None:
    PATH.write_text(page(PATH.read_text()))


def page(text: str) -> str:
    return text[: text.index(BEGIN)] + section() + text[text.index(END) + len(END) :]
