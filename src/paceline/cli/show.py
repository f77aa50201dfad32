"""What a person sees while tokens come."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from paceline.llm import Piece, Result
from paceline.models import Progress as Report
from paceline.types import TARGET

COLOURS: Final = {
    TARGET: "default",
    "suffix": "green",
    "ngram": "cyan",
    "model": "magenta",
    "prediction": "blue",
    "grammar": "yellow",
}


class Shown:
    """Writes pieces as they come, coloured by who guessed them if wanted."""

    def __init__(self, console: Console, coloured: bool) -> None:
        self._console = console
        self._coloured = coloured
        self._seen: dict[str, None] = {}

    def piece(self, piece: Piece) -> None:
        self._seen[piece.source] = None
        style = COLOURS.get(piece.source, "red") if self._coloured else ""
        self._console.print(Text(piece.text, style=style), end="")

    def end(self) -> None:
        self._console.print()
        if self._coloured:
            legend = [Text(source, style=COLOURS.get(source, "red")) for source in self._seen]
            self._console.print(Text(" ").join([Text("guessed by:"), *legend]))


def summary(result: Result) -> str:
    n = len(result.token_ids)
    rate = n / result.seconds if result.seconds else 0.0
    lossy = " · LOSSY: accept=typical" if result.lossy else ""
    return (
        f"{n} tokens in {result.passes} passes · {result.tokens_per_pass:.2f} per pass · "
        f"{rate:.1f} tokens/s · {result.shared_tokens} of {result.prompt_tokens} prompt tokens cached · "
        f"seed {result.seed}{lossy}"
    )


@contextmanager
def bar() -> Iterator[Report]:
    """A progress bar for a pull."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True))

    def report(done: int, total: int, label: str) -> None:
        if not progress.tasks:  # nothing is drawn for a pull that is refused at once
            progress.add_task("")
            progress.start()
        progress.update(progress.task_ids[0], completed=done, total=total, description=label)

    try:
        yield report
    finally:
        if progress.tasks:
            progress.stop()
