"""Answers as HTML for notebooks: text coloured by drafter, figures below it.

Only inline styles: no script, no style sheet, nothing from the network. Colours are translucent and the text
keeps the page's own colour, so that it can be read on light and on dark pages. Everything is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Final

from paceline.types import TARGET

# Red, green and blue of each drafter of the package, near those of the terminal.
COLOURS: Final = {
    "grammar": (191, 135, 0),
    "suffix": (46, 160, 67),
    "ngram": (27, 159, 168),
    "recycle": (57, 197, 207),
    "prediction": (47, 129, 247),
    "model": (163, 64, 199),
    "self": (219, 97, 162),
    "quantized": (84, 110, 230),
    "medusa": (212, 167, 44),
    "eagle": (248, 81, 73),
    "block": (86, 211, 100),
    "mailbox": (219, 109, 40),
}
OWN: Final = (207, 34, 46)  # any drafter that a user adds


def coloured(texts: Sequence[str], sources: Sequence[str]) -> str:
    """The text of an answer; neighbours with one drafter are one span. The drafter is the span's title."""
    parts = []
    for source, group in groupby(zip(texts, sources, strict=True), key=lambda pair: pair[1]):
        text = "".join(text for text, _ in group)
        parts.append(text_span(text, source) if text else "")
    return "".join(parts)


def text_span(text: str, source: str) -> str:
    if source == TARGET:
        return escape(text)
    colour = ",".join(map(str, COLOURS.get(source, OWN)))
    style = f"background:rgba({colour},.22);border-bottom:2px solid rgba({colour},.9)"
    return f'<span title="{escape(source)}" style="{style}">{escape(text)}</span>'


def block(inner: str) -> str:
    """Text as it is, line breaks and spaces included. inner: HTML."""
    return f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{inner}</div>'


def caption(line: str, sources: Iterable[str] = ()) -> str:
    """A small line of figures, and a legend of the drafters."""
    legend = "".join(f" {text_span(source, source)}" for source in sources if source != TARGET)
    return f'<div style="font-size:smaller;opacity:.75">{escape(line)}{legend}</div>'
