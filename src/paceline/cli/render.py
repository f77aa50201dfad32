"""What a person sees while tokens come."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from paceline.hub import Progress as Report
from paceline.types import TARGET

if TYPE_CHECKING:
    from paceline.output import Result, Stream

# ANSI colours. The text itself is written untouched, tabs and carriage returns included.
COLOURS: Final = {
    TARGET: "",
    "suffix": "\033[32m",
    "ngram": "\033[36m",
    "model": "\033[35m",
    "self": "\033[95m",
    "quantized": "\033[95m",
    "prediction": "\033[34m",
    "grammar": "\033[33m",
}
OTHER: Final = "\033[31m"
RESET: Final = "\033[0m"


def coloured(text: str, source: str) -> str:
    colour = COLOURS.get(source, OTHER)
    return f"{colour}{text}{RESET}" if colour and text else text


def write(stream: "Stream", show: bool, summed_up: bool = True) -> None:
    """The answer goes to standard output as it comes; what is said about it goes to standard error."""
    seen: dict[str, None] = {}
    with stream:
        for piece in stream:
            seen[piece.source] = None
            sys.stdout.write(coloured(piece.text, piece.source) if show else piece.text)
            sys.stdout.flush()
    print()
    if show:
        print("guessed by:", *(coloured(source, source) for source in seen), file=sys.stderr)
    if summed_up:
        print(summary(stream.result), file=sys.stderr)


def summary(result: "Result") -> str:
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
