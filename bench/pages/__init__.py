"""Pages that are written from bench/results.

numbers        docs/numbers.md: questions and short answers
results_page   bench/results/README.md: every table
readme         the table in README.md
scale          the tables in docs/scale.md
agents         the tables in docs/agents.md and docs/cache.md
models         the table in docs/models.md
"""

from collections.abc import Sequence
from typing import Any


def keep(name: str, command: str, given: Sequence[str], model: str | None = None, **values: Any) -> None:
    """Stores a result with the facts about its machine and command, and writes the pages anew."""
    from bench import machine, results_folder

    about = machine.facts() if model is None else {"model": model, **machine.facts()}
    results_folder.write({"machine": about, "command": machine.command(command, given), **values}, name)
    write()


def write() -> None:
    """All of them. A test compares them with the stored results."""
    from bench.pages import agents, models, numbers, readme, results_page, scale

    numbers.PATH.write_text(numbers.page())
    results_page.PATH.write_text(results_page.page())
    readme.update()
    scale.update()
    agents.update()
    models.update()
