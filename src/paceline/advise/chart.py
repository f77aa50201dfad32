"""Charts: SVG without any library, PNG with matplotlib, bars in a terminal.

An SVG follows the reader's dark or light theme, in a page and on its own, and refers to nothing outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from math import floor, log2, log10
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.errors import SettingError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH: Final = 640  # pixels
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 44  # margins
COLOURS: Final = ("#2f6fde", "#d9722e", "#2e9e6b", "#9b59b6", "#b8860b")
LETTER: Final = 7.0  # pixels of a letter, about
LABEL_GAP: Final = 22  # pixels from a number on an axis or above a bar to the next, at least
SWATCH: Final = 26  # of a colour in the legend, with the room around it
BAR_WIDTH: Final = 40  # columns of a terminal
STYLE: Final = """\
.chart { color: #1f2328; font: 12px system-ui, sans-serif; }
.chart text { fill: currentColor; } .chart .title { font-size: 14px; font-weight: 600; }
.chart .grid { stroke: currentColor; opacity: .15; }
.chart .level, .chart .cap { stroke: currentColor; opacity: .5; }
@media (prefers-color-scheme: dark) { .chart { color: #e6edf3; } }"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or the bars of one colour. intervals: (low, high) of each value, or none."""

    name: str
    values: Sequence[float]
    intervals: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over numbers, or bars over labels.

    level: a value to compare with, drawn across. mark: a place on the x axis, and its name. log: numbers are
    as far apart as their logarithms.
    """

    title: str
    x_label: str
    y_label: str
    xs: Sequence[float] | Sequence[str]
    series: Sequence[Series]
    bars: bool = False
    level: float | None = None
    mark: tuple[float, str] | None = None
    log: bool = False

    @property
    def top(self) -> float:
        highs = [high for s in self.series for _, high in s.intervals]
        values = [value for s in self.series for value in s.values]
        return max([*highs, *values, self.level or 0.0, 1e-9])


def require_format(path: Path) -> None:
    """Called before a long run: `save` can write a file of this name."""
    ending = path.suffix.lower()
    if ending not in (".svg", ".png"):
        raise SettingError("plot", path.name, "a name that ends in .svg or .png")
    if ending == ".png" and find_spec("matplotlib") is None:
        hint = "pip install 'paceline[plot]', or give a name that ends in .svg"
        raise UsageError(f"a PNG needs matplotlib: {hint}")


def save(charts: Sequence[Chart], path: Path) -> None:
    """One below the other, as the ending of the name says: .svg or .png."""
    require_format(path)
    if path.suffix.lower() == ".png":
        _save_png(charts, path)
    else:
        path.write_text(_page(charts), "utf-8")


def _page(charts: Sequence[Chart]) -> str:
    if len(charts) == 1:
        return svg(charts[0], standalone=True)
    height = HEIGHT * len(charts)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}">'
    )
    parts = [svg(chart, standalone=True, top=HEIGHT * i) for i, chart in enumerate(charts)]
    return f"{head}\n{''.join(parts)}</svg>\n"


def terminal_bars(labels: Sequence[str], values: Sequence[float], marked: int | None = None) -> list[str]:
    """One line each, longest bar for the highest value. marked: the index of a line to point at."""
    top, width = max([*values, 1e-9]), max(map(len, labels), default=0)
    lines = []
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        bar = "█" * round(BAR_WIDTH * value / top)
        lines.append(f"{label:>{width}}  {value:5.2f} {bar}{' <' if i == marked else ''}")
    return lines


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 up to `top` or just above it."""
    step = 10 ** floor(log10(top / count))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * count >= top)
    return [i * step for i in range(count + 1) if (i - 1) * step < top]


class _Plane:
    """From values to pixels."""

    def __init__(self, chart: Chart) -> None:
        self.marks = ticks(chart.top)
        self._log = chart.log
        self._numbers = [self._number(x) for x in chart.xs if not isinstance(x, str)]
        self._count = len(chart.xs)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.marks[-1] * (HEIGHT - TOP - BOTTOM)

    def x(self, index: int) -> float:
        """The middle of a bar's slot, or the place of a number."""
        if not self._numbers:
            return LEFT + (index + 0.5) * self.slot
        return self._at(self._numbers[index])

    def mark_x(self, value: float) -> float | None:
        """The place of a number; None: it is outside."""
        if not self._numbers or not self._numbers[0] <= (number := self._number(value)) <= self._numbers[-1]:
            return None
        return self._at(number)

    def _number(self, value: float) -> float:
        return log2(value) if self._log else value

    def _at(self, number: float) -> float:
        low, high = self._numbers[0], self._numbers[-1]
        return LEFT + (number - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    @property
    def slot(self) -> float:
        return (WIDTH - LEFT - RIGHT) / self._count


def svg(chart: Chart, standalone: bool = False, top: int = 0) -> str:
    """standalone: with its own style, for a file; in a page the page has STYLE once. top: where it begins."""
    plane, place = _Plane(chart), f' y="{top}"' if top else ""
    style = f"<style>{STYLE}</style>" if standalone else ""
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}"{place} role="img" aria-label="{escape(chart.title)}">{style}',
        _text(LEFT, 18, chart.title, "start", "title"),
        *_axes(chart, plane),
        *(_bars(chart, plane) if chart.bars else _lines(chart, plane)),
        *_legend(chart),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axes(chart: Chart, plane: _Plane) -> list[str]:
    parts = []
    for mark in plane.marks:
        y = plane.y(mark)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "grid"))
        parts.append(_text(LEFT - 6, y + 4, f"{mark:g}", "end"))
    if chart.level is not None:
        y = plane.y(chart.level)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "level", ' stroke-dasharray="4 3"'))
    parts += _mark(chart, plane)
    last = -float(LABEL_GAP)
    for i, value in enumerate(chart.xs):
        if (x := plane.x(i)) < last + LABEL_GAP:
            continue
        label, last = value if isinstance(value, str) else f"{value:g}", x
        parts.append(_text(x, HEIGHT - BOTTOM + 16, label, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x_label, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="rotate(-90 14 {middle:g})">{_text(14, middle, chart.y_label, "middle")}</g>'
    return [*parts, turned]


def _mark(chart: Chart, plane: _Plane) -> list[str]:
    """A line from top to bottom, with its name beside it."""
    if chart.mark is None or (x := plane.mark_x(chart.mark[0])) is None:
        return []
    anchor, at = ("start", x + 5) if x < WIDTH / 2 else ("end", x - 5)
    line = _line(x, TOP, x, HEIGHT - BOTTOM, "level", ' stroke-dasharray="2 3"')
    return [line, _text(at, HEIGHT - BOTTOM - 8, chart.mark[1], anchor)]


def _lines(chart: Chart, plane: _Plane) -> list[str]:
    parts = []
    for series, colour in zip(chart.series, COLOURS, strict=False):
        points = [(plane.x(i), plane.y(value)) for i, value in enumerate(series.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    return parts


def _bars(chart: Chart, plane: _Plane) -> list[str]:
    parts, width = [], 0.7 * plane.slot / len(chart.series)
    for n, (series, colour) in enumerate(zip(chart.series, COLOURS, strict=False)):
        for i, value in enumerate(series.values):
            x = plane.x(i) + (n - len(chart.series) / 2) * width
            y = plane.y(value)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.9 * width:.1f}" '
                f'height="{plane.y(0) - y:.1f}" rx="2" fill="{colour}"/>'
            )
            middle, above = x + 0.45 * width, y
            if series.intervals:
                low, high = (plane.y(bound) for bound in series.intervals[i])
                above = min(y, high)
                parts.append(_line(middle, low, middle, high, "level"))
                parts += [_line(middle - 4, end, middle + 4, end, "cap") for end in (low, high)]
            if width >= LABEL_GAP:
                parts.append(_text(middle, above - 5, f"{value:.2f}", "middle"))
    return parts


def _legend(chart: Chart) -> list[str]:
    """Only where there are several series."""
    if len(chart.series) < 2:
        return []
    widths = [SWATCH + LETTER * len(series.name) for series in chart.series]
    parts, x = list[str](), WIDTH - RIGHT - sum(widths)
    for series, colour, width in zip(chart.series, COLOURS, widths, strict=False):
        parts.append(f'<rect x="{x:.1f}" y="9" width="9" height="9" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 14, 18, series.name, "start"))
        x += width
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, more: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="{kind}"{more}/>'


def _save_png(charts: Sequence[Chart], path: Path) -> None:
    from matplotlib.figure import Figure

    size = (WIDTH / 100, len(charts) * HEIGHT / 100)
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False)[:, 0], strict=True):
        _plot(chart, axes)
    figure.savefig(path, format="png")


def _plot(chart: Chart, axes: "Axes") -> None:
    xs = [float(x) for x in chart.xs]
    for series, colour in zip(chart.series, COLOURS, strict=False):
        axes.plot(xs, list(series.values), "o-", color=colour, label=series.name, markersize=4)
    if chart.level is not None:
        axes.axhline(chart.level, color="grey", linestyle="--", linewidth=1)
    if chart.mark is not None and xs[0] <= chart.mark[0] <= xs[-1]:
        axes.axvline(chart.mark[0], color="grey", linestyle=":", linewidth=1, label=chart.mark[1])
    if chart.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, None))
    axes.grid(alpha=0.25)
    if len(chart.series) > 1:
        axes.legend()
