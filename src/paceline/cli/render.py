"""Terminal output: tokens coloured by drafter, a summary line, a picture of both, progress bars."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
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
from rich.table import Column
from rich.text import Text

from paceline.hub import Progress as Report
from paceline.types import TARGET

if TYPE_CHECKING:
    from paceline.output import Result, Stream

# One ANSI colour for each drafter of the package. The text itself is written untouched, tabs and carriage
# returns included.
COLOURS: Final = {
    TARGET: "",
    "grammar": "\033[33m",
    "suffix": "\033[32m",
    "ngram": "\033[36m",
    "recycle": "\033[96m",
    "prediction": "\033[34m",
    "model": "\033[35m",
    "self": "\033[95m",
    "quantized": "\033[94m",
    "medusa": "\033[93m",
    "eagle": "\033[91m",
    "block": "\033[92m",
    "mailbox": "\033[38;5;208m",
}
OWN: Final = "\033[31m"  # any drafter that a user adds
RESET: Final = "\033[0m"
PICTURE_WIDTH: Final = 100  # columns


def coloured(text: str, source: str) -> str:
    colour = COLOURS.get(source, OWN)
    return f"{colour}{text}{RESET}" if colour and text else text


class Terminal:
    """Writes answers to standard output as they come, and facts about them to standard error."""

    def __init__(self, show: bool = False) -> None:
        self._show = show
        self._shown: list[str] = []  # for a picture: in colours, whatever the terminal has
        self._out_colours, self._err_colours = (_has_colours(Console(stderr=err)) for err in (False, True))

    def write(self, stream: "Stream") -> None:
        sources: dict[str, None] = {}
        with stream:
            for piece in stream:
                sources[piece.source] = None
                self._text(piece.text, piece.source)
        self._text("\n")
        if self._show:
            names = " ".join(coloured(source, source) for source in sources)
            self._fact(f"drafted by: {names}", f"drafted by: {' '.join(sources)}")
        self._fact(summary(stream.result))

    def compare(self, result: "Result", plain: "Result") -> None:
        same = "yes" if result.token_ids == plain.token_ids else "NO"
        self._fact(f"identical to plain: {same} · {result.passes} passes instead of {plain.passes}")

    def save_picture(self, path: Path, command: str) -> None:
        """An SVG of a terminal: the command, then everything written so far."""
        console = Console(record=True, width=PICTURE_WIDTH, file=StringIO(), force_terminal=True)
        console.print(Text.assemble(("$ ", "bold"), command))
        console.print(Text.from_ansi("".join(self._shown)))
        svg = console.export_svg(title="paceline", unique_id="terminal")
        svg = re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.S)  # fonts of the viewer's machine only
        path.write_text(svg.replace("<svg ", '<svg xml:space="preserve" ', 1), "utf-8")

    def _text(self, text: str, source: str = TARGET) -> None:
        shown = coloured(text, source) if self._show else text
        self._shown.append(shown)
        sys.stdout.write(shown if self._out_colours else text)
        sys.stdout.flush()

    def _fact(self, line: str, colourless: str = "") -> None:
        self._shown.append(line + "\n")
        print(line if self._err_colours else colourless or line, file=sys.stderr)


def _has_colours(console: Console) -> bool:
    """By rich: a terminal that is not dumb, or FORCE_COLOR; never with NO_COLOR."""
    return console.color_system is not None and not console.no_color


def summary(result: "Result") -> str:
    n = len(result.token_ids)
    rate = n / result.seconds if result.seconds else 0.0
    lossy = " · LOSSY: accept=typical" if result.lossy else ""
    return (
        f"{n} tokens in {result.passes} passes · {result.tokens_per_pass:.2f} per pass · "
        f"{rate:.1f} tokens/s · {result.cached_tokens} of {result.prompt_tokens} prompt tokens cached · "
        f"seed {result.seed}{lossy}"
    )


@contextmanager
def bar() -> Iterator[Report]:
    """A progress bar for a pull."""
    columns = (
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), expand=True)

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
