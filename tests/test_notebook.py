"""Results in a notebook: text, colours and figures as safe HTML; a short line elsewhere."""

import re
from html.parser import HTMLParser
from typing import Any

from paceline import Result
from paceline.types import TARGET

EVIL = '<script>alert("x")</script> & <img src="http://x/y" onerror=\'a\'>'


class Reader(HTMLParser):
    """Text and tags of a fragment."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def result(texts: list[str], sources: list[str], **more: Any) -> Result:
    return Result(
        text="".join(texts),
        texts=tuple(texts),
        token_ids=tuple(range(len(texts))),
        sources=tuple(sources),
        seed=0,
        output_tokens=len(texts),
        passes=2,
        finish="stop",
        **more,
    )


def test_text_is_coloured_by_drafter_and_nothing_of_it_is_lost() -> None:
    html = result(["One", ",\n  ", "two", "!"], [TARGET, "suffix", "suffix", "mine"])._repr_html_()
    read = Reader(html)
    assert read.text.startswith("One,\n  two!4 tokens in 2 passes, 2.00 per pass, finish=stop")
    assert not read.open
    titles = [attrs.get("title") for tag, attrs in read.tags if tag == "span"]
    assert titles == ["suffix", "mine", "suffix", "mine"]  # in the text, then in the legend
    backgrounds = set(re.findall(r"background:rgba\([\d,]+,\.22\)", html))
    assert len(backgrounds) == 2


def test_everything_is_escaped_and_nothing_is_loaded() -> None:
    html = result([EVIL, EVIL], [TARGET, EVIL])._repr_html_()
    read = Reader(html)
    assert {tag for tag, _ in read.tags} == {"div", "span"}
    assert {name for _, attrs in read.tags for name in attrs} == {"style", "title"}
    assert EVIL + EVIL in read.text
    assert "url(" not in "".join(attrs.get("style") or "" for _, attrs in read.tags)


def test_colours_leave_the_page_its_own() -> None:
    """The text keeps the page's colour, light or dark."""
    html = result(["a"], ["grammar"])._repr_html_()
    styles = [attrs.get("style") or "" for _, attrs in Reader(html).tags]
    assert not any(re.search(r"(^|;)color:", style) for style in styles)
    assert not any("background:#" in style for style in styles)


def test_a_result_without_its_pieces_is_shown_plainly() -> None:
    shown = Result(text="<b>", token_ids=(1,), sources=("suffix",), seed=0)._repr_html_()
    assert Reader(shown).text.startswith("<b>")


def test_a_result_is_one_short_line() -> None:
    line = repr(result(["word\n"] * 100, [TARGET] * 100, lossy=True))
    assert line.startswith("Result('word\\nword")
    assert line.endswith("100 tokens in 2 passes, 50.00 per pass, finish=stop, lossy)")
    assert len(line) < 140
    assert (
        repr([result(["a"], [TARGET])]) == "[Result('a', 1 tokens in 2 passes, 0.50 per pass, finish=stop)]"
    )
