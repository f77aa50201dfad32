"""paceline estimate"""

import json
from pathlib import Path

import pytest

from paceline.cli import main

FIGURES = {"--acceptance": "0.75", "--draft-length": "5", "--draft-ms": "5", "--target-ms": "100"}
EXAMPLE = ("estimate", *(word for option in FIGURES.items() for word in option))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_textbook_example_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EXAMPLE)
    assert code == 0
    assert "tokens per pass   3.29: 2.29 accepted, 1 of the model's own" in out
    assert "speed-up          2.63 x" in out
    assert "textbook          3.00 x: 0.75 x 5 = 3.75 accepted tokens" in out
    assert "0.75 + 0.75^2 + ... + 0.75^5 = 2.29" in out
    assert "Give --compute-ms" in out


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    code, out, _ = run(capsys, *EXAMPLE, "--compute-ms", "6", "--json", "--plot", str(plot))
    figures = json.loads(out)
    assert code == 0
    assert figures["chosen"]["speedup"] == pytest.approx(2.63, abs=0.005)
    assert figures["textbook"] == {"accepted": 3.75, "speedup": 3.0}
    assert figures["crossover_rows"] == pytest.approx(16.67, abs=0.01)
    assert [at["draft_length"] for at in figures["batches"]][-1] == 0
    assert len(figures["lengths"]) == 17
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target-ms", "1", "--target", "x"], "either --target-ms"),
        ([], "either --target-ms"),
        (["--target", "x", "--row-ms", "1"], "belong to --target-ms"),
        (["--target-ms", "-1"], "ms=-1.0 is not usable: expected more than 0"),
    ],
)
def test_wrong_costs_are_named(capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    code, out, err = run(capsys, "estimate", "--acceptance", "0.5", *more)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.model
def test_a_model_is_measured_here(capsys: pytest.CaptureFixture[str], smollm2_path: Path) -> None:
    code, out, _ = run(capsys, "estimate", "--acceptance", "0.8", "--target", str(smollm2_path), "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["lengths"][0]["speedup"] == 1
    assert figures["lengths"][8]["verify_ms"] > 0
