"""paceline estimate"""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from paceline.cli import main
from paceline.cli.main import app

FIGURES = {"--acceptance": "0.75", "--draft-length": "5", "--draft-ms": "5", "--target-ms": "100"}
EXAMPLE = ("estimate", *(word for option in FIGURES.items() for word in option))


def docs_section() -> str:
    page = (Path(__file__).parents[2] / "docs" / "advise.md").read_text("utf-8")
    return page[page.index("## Estimate") : page.index("## Advise")]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_textbook_example_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EXAMPLE)
    assert code == 0
    assert "tokens per pass   3.29: 2.29 accepted, 1 of the model's own" in out
    assert "speed-up          2.63 x: 3.29 tokens x 100.0 / 125.0 ms" in out
    assert "textbook          3.00 x: 0.75 x 5 = 3.75 accepted tokens x 100.0 / 125.0 ms" in out
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
    assert "bound by arithmetic from here" in plot.read_text()


def test_load_has_a_curve_and_a_crossover(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--target-ms", "100", "--row-ms", "1", "--compute-ms", "2", "--draft-ms", "1:5,8:19")
    code, out, _ = run(capsys, "estimate", "--acceptance", "0.75", *costs, "--batch", "3")
    assert code == 0
    assert "fewer than about 99.0 rows" in out
    assert "with drafts of 5 those of 16.5 sequences and more" in out
    lines = out.splitlines()
    (drafting,) = [line.split()[:2] for line in lines if line.startswith(" 5 ")]
    assert drafting == ["5", "13.0"]
    first = next(i for i, line in enumerate(lines) if line.startswith("Sequences in a pass")) + 1
    assert [line.split()[0] for line in lines[first:]] == ["1", "2", "3", "4", "8", "16", "32", "64"]


@pytest.mark.parametrize(
    ("row_ms", "compute_ms", "message"),
    [("1", "0", "No pass is bound by arithmetic"), ("0", "200", "Every pass is bound by arithmetic")],
)
def test_a_pass_may_have_no_crossover(
    capsys: pytest.CaptureFixture[str], row_ms: str, compute_ms: str, message: str
) -> None:
    code, out, _ = run(capsys, *EXAMPLE, "--row-ms", row_ms, "--compute-ms", compute_ms)
    assert (code, message in out) == (0, True)


def test_certain_drafts_that_save_nothing_are_bound_by_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "estimate", "--acceptance", "1", "--target-ms", "2", "--compute-ms", "2")
    assert "Every pass is bound by arithmetic" in out
    assert "One more row costs nothing" not in out


def test_short_passes_have_more_decimals(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "estimate", "--acceptance", "0.75", "--target-ms", "0.45", "--draft-ms", "0.02")
    assert "time of a round   0.550 ms: 0.100 drafting, 0.450 verifying" in out


def test_certain_acceptance_has_its_own_formula(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "estimate", "--acceptance", "1", "--target-ms", "100")
    assert "E(K) = K + 1 = 6.00." in out


@pytest.mark.parametrize(
    ("name", "message"),
    [("plot.gif", "ends in .svg or .png"), ("none/plot.svg", "there is no folder"), ("", "is a folder")],
)
def test_the_plots_file_is_checked_before_a_model_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, message: str
) -> None:
    plot = str(tmp_path / name)
    code, out, err = run(capsys, "estimate", "--acceptance", "0.5", "--target", "nowhere", "--plot", plot)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_the_ending_of_a_plot_may_be_in_upper_case(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, *EXAMPLE, "--plot", str(tmp_path / "a.SVG"))[0] == 0
    assert (tmp_path / "a.SVG").read_text().startswith("<svg")


def test_the_docs_show_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    section = docs_section()
    command = re.search(r"```sh\npaceline (estimate .*)\n```", section)
    assert command is not None
    _, out, _ = run(capsys, *shlex.split(command[1]))
    assert f"```text\n{out}```" in section


def test_the_docs_name_every_option() -> None:
    section = docs_section()
    command = get_command(app).commands["estimate"]  # type: ignore[attr-defined]
    options = [option for parameter in command.params for option in parameter.opts]
    assert len(options) > 10
    assert [option for option in options if f"`{option}`" not in section] == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target-ms", "1", "--target", "x"], "either --target-ms"),
        ([], "either --target-ms"),
        (["--target", "x", "--row-ms", "1"], "belong to --target-ms"),
        (["--target-ms", "-1"], "--target-ms=-1.0 is not usable: expected 1e-06 to"),
        (["--target-ms", "inf"], "--target-ms=inf is not usable"),
        (["--target-ms", "100", "--draft-ms", "nan"], "--draft-ms=nan is not usable"),
        (
            ["--target-ms", "100", "--draft-ms", "five"],
            "--draft-ms='five' is not usable: expected milliseconds",
        ),
        (["--target-ms", "100", "--draft-ms", "1:2,x:3"], "--draft-ms='1:2,x:3' is not usable"),
        (["--target-ms", "100", "--draft-ms", "1:2,"], "--draft-ms='1:2,' is not usable"),
        (["--target-ms", "100", "--draft-ms", "4:2,1:3"], "expected two or more lengths that rise"),
        (["--target-ms", "100", "--draft-ms", "1:2", "--draft-start-ms", "1"], "belongs to a single"),
        (["--target-ms", "100", "--context", "64"], "--context belongs to --target"),
        (["--target-ms", "100", "--max-draft", "4"], "--max-draft=4 is not usable: expected 5"),
        (["--target", "nowhere", "--max-draft", "4"], "--max-draft=4 is not usable: expected 5"),
    ],
)
def test_wrong_costs_are_named(capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    code, out, err = run(capsys, "estimate", "--acceptance", "0.5", *more)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


@pytest.mark.model
def test_a_model_is_measured_here(capsys: pytest.CaptureFixture[str], smollm2_path: Path) -> None:
    code, out, _ = run(capsys, "estimate", "--acceptance", "0.8", "--target", str(smollm2_path), "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["lengths"][0]["speedup"] == 1
    assert figures["lengths"][8]["verify_ms"] > 0
