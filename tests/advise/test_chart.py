"""Charts that any viewer shows, with nothing from outside."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.advise.chart import (
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Chart,
    Series,
    require_format,
    save,
    svg,
    terminal_bars,
    ticks,
)
from paceline.errors import SettingError, UsageError

SPACE = "{http://www.w3.org/2000/svg}"
LINES = Chart(
    "A < B", "length", "times", [0, 1, 2], (Series("a", [1, 2, 1.5]), Series("b", [1, 1, 1])), level=1
)
BARS = Chart("Routes", "", "x", ["one", "two"], (Series("a", [2, 1], [(1.5, 2.5), (0.9, 1.1)]),), bars=True)


@pytest.mark.parametrize("chart", [LINES, BARS], ids=["lines", "bars"])
def test_an_svg_is_well_formed_and_refers_to_nothing_outside(chart: Chart) -> None:
    text = svg(chart, standalone=True)
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == chart.title
    assert "url(" not in text
    assert "href" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_higher_value_is_drawn_higher_and_an_interval_around_it() -> None:
    root = ElementTree.fromstring(svg(BARS))
    tops = [float(bar.attrib["y"]) for bar in root.iter(f"{SPACE}rect")]
    spans = [
        (float(line.attrib["y2"]), float(line.attrib["y1"]))
        for line in root.iter(f"{SPACE}line")
        if line.get("class") == "level"
    ]
    assert tops[0] < tops[1]
    assert all(high < top < low for top, (high, low) in zip(tops, spans, strict=True))


def test_the_ending_of_the_name_decides_the_format(tmp_path: Path) -> None:
    save([LINES], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    save([LINES], tmp_path / "b.SVG")
    assert (tmp_path / "b.SVG").read_text() == (tmp_path / "a.svg").read_text()
    with pytest.raises(SettingError, match=r"svg or \.png"):
        save([LINES], tmp_path / "a.gif")
    with pytest.raises(SettingError, match=r"svg or \.png"):
        require_format(tmp_path / "a")


def test_several_charts_are_one_below_the_other(tmp_path: Path) -> None:
    save([LINES, BARS], tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert [chart.get("y") for chart in root] == [None, str(HEIGHT)]
    assert root.get("height") == str(2 * HEIGHT)


@pytest.mark.parametrize(("at", "share"), [(4.0, 2 / 6), (16.0, 4 / 6), (64.0, 1.0), (65.0, None)])
def test_a_mark_is_at_its_number(at: float, share: float | None) -> None:
    load = Chart("Load", "", "x", [1, 4, 64], (Series("a", [2, 2, 1]),), mark=(at, "here"), log=True)
    root = ElementTree.fromstring(svg(load))
    upright = [line for line in root.iter(f"{SPACE}line") if line.get("x1") == line.get("x2")]
    assert len(upright) == ("here" in svg(load)) == (share is not None)
    if share is not None:
        assert float(upright[0].attrib["x1"]) == pytest.approx(LEFT + share * (WIDTH - LEFT - RIGHT), abs=0.1)


def test_numbers_that_would_overlap_are_left_out() -> None:
    near = Chart("Load", "", "x", [1, 32, 63, 64], (Series("a", [2, 2, 1, 1]),), log=True)
    texts = [text.text for text in ElementTree.fromstring(svg(near)).iter(f"{SPACE}text")]
    assert ("63" in texts, "64" in texts) == (True, False)
    for routes, labelled in ((2, True), (40, False)):
        wide = Chart("Routes", "", "x", ["r"] * routes, (Series("a", [1.23] * routes),), bars=True)
        assert (">1.23<" in svg(wide)) is labelled


def test_a_png_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.advise.chart.find_spec", lambda name: None)
    require_format(Path("a.svg"))
    with pytest.raises(UsageError, match=r"pip install 'paceline\[plot\]'"):
        require_format(Path("a.png"))


def test_a_png_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    save([LINES], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_bars_in_a_terminal_are_as_long_as_their_values() -> None:
    first, second = terminal_bars(["0", "10"], [1.0, 2.0], marked=1)
    assert first.count("█") * 2 == second.count("█")
    assert first.startswith(" 0")
    assert second.endswith(" <")


@pytest.mark.parametrize("top", [0.03, 1.0, 3.97, 10, 870])
def test_ticks_are_round_and_reach_the_top(top: float) -> None:
    marks = ticks(top)
    assert marks[0] == 0
    assert marks[-1] >= top
    assert len(marks) in (3, 4, 5, 6)
