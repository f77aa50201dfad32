"""Tables of results: columns defined once, printed in a terminal or as Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `bench drafters` runs on machines without rich
    from rich.table import Table as TerminalTable

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A title, and how a row's value is written: a key of the row, or a function of it."""

    title: str
    value: str | Callable[[Any], str]

    def cell(self, row: Row) -> str:
        return str(row[self.value]) if isinstance(self.value, str) else self.value(row)


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @staticmethod
    def of(columns: Sequence[Column], rows: Iterable[Row], title: str = "") -> "Table":
        return Table([c.title for c in columns], [[c.cell(row) for c in columns] for row in rows], title)

    def markdown(self) -> list[str]:
        """Its lines, an empty one last."""
        lines = [f"### {self.title}", ""] if self.title else []
        return [*lines, _line(self.head), "|" + "---|" * len(self.head), *map(_line, self.rows), ""]

    def terminal(self, sections: int = 0) -> "TerminalTable":
        """sections: a line is drawn where the first so many cells change."""
        from rich.table import Table as TerminalTable

        shown, before = TerminalTable(*self.head, title=self.title or None), None
        for row in self.rows:
            here = list(row[:sections])
            if before not in (None, here):
                shown.add_section()
            shown.add_row(*row)
            before = here
        return shown


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # never -0.00


def spread(value: Mapping[str, float] | None, digits: int = 2) -> str:
    """Median, lowest and highest; the value alone where it was measured once."""
    if not value:
        return "-"
    middle, low, high = (f"{value[key]:.{digits}f}" for key in ("median", "low", "high"))
    return middle if value["low"] == value["high"] else f"{middle} ({low} to {high})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
