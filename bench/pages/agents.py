"""The tables in docs/agents.md and docs/cache.md.

What each habit of an agent is worth, how many tool calls are predicted and what that saves, and the first
token after a restart.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench import prefetch, results_folder
from bench.runs import effects, restarts, tool_waits
from bench.table import Table

DOCS: Final = Path(__file__).parent.parent.parent / "docs"
Lines = list[str]


def habits() -> Lines:
    lines = []
    for result in reversed(results_folder.read("agents")):
        lines += [
            _about(result, f"first token, median (lowest to highest) of {result['repeats']}"),
            "",
            *Table.of(effects.COLUMNS, result["rows"]).markdown(),
        ]
    return lines


def predicted() -> Lines:
    lines = []
    for result in results_folder.read("prefetch"):
        lines += [prefetch.about(result), "", *Table.of(prefetch.SHORT, result["rows"]).markdown()]
    return lines


def tool_times() -> Lines:
    lines = []
    for result in reversed(results_folder.read(tool_waits.RESULT)):
        lines += [tool_waits.about(result), "", *Table.of(tool_waits.COLUMNS, result["rows"]).markdown()]
    return lines


def after_restarts() -> Lines:
    lines = []
    for result in reversed(results_folder.read("restarts")):
        lines += [
            _about(result, f"median (lowest to highest) of {result['rounds']} rounds"),
            "",
            *Table.of(restarts.COLUMNS, result["rows"]).markdown(),
        ]
    return lines


def _about(result: Mapping[str, Any], what: str) -> str:
    machine = result["machine"]
    return (
        f"{machine['model']}, {machine['cpu']}, {machine['cores']} cores, {what}, `{result['command']}`, "
        f"{machine['date']}, commit {machine['commit']}:"
    )


SECTIONS: Final[Mapping[str, Mapping[str, Callable[[], Sequence[str]]]]] = {  # by page and mark
    "agents.md": {"agents": habits, "prefetch": predicted, "tool waits": tool_times},
    "cache.md": {"restarts": after_restarts},
}


def update() -> None:
    for name in SECTIONS:
        (DOCS / name).write_text(page(name, (DOCS / name).read_text()))


def page(name: str, text: str) -> str:
    """With its sections as the results have them."""
    for mark, lines in SECTIONS[name].items():
        begin = f"<!-- {mark}: written by `python -m bench pages` from bench/results -->"
        end = f"<!-- /{mark} -->"
        made = "\n".join([begin, "", *lines(), end])
        text = text[: text.index(begin)] + made + text[text.index(end) + len(end) :]
    return text
