"""paceline split plan"""

import json

import pytest

from paceline.cli import main

EXAMPLE = ("split", "plan", "--rtt", "100", "--target-ms", "20", "--draft-ms", "5", "--acceptance", "0.8")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_each_mode_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EXAMPLE)
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert code == 0
    assert lines["streaming"][1:5] == ["20.0", "1.00", "x", "0"]
    assert lines["synchronous"][1] == "37.4"
    assert lines["opportunistic"][1] == "17.7"
    assert "any RTT" in " ".join(lines["opportunistic"])
    assert "32 ms" in " ".join(lines["patient"])
    assert "7 tokens after a rejection: 21 % of the runs" in out


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EXAMPLE, "--verify-ms", "30", "--message", "4", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["costs"]["verify_ms"] == 30
    assert made["fastest"] == "opportunistic"
    modes = {one["mode"]: one for one in made["modes"]}
    assert modes["opportunistic"]["break_even_rtt_ms"] is None
    assert modes["opportunistic"]["ms_per_token"] <= 20
    assert 0 < modes["patient"]["passes_per_token"] < 0.3


def test_a_drafter_as_slow_as_the_target_never_pays(capsys: pytest.CaptureFixture[str]) -> None:
    slow = [word.replace("5", "20") if word == "5" else word for word in EXAMPLE]
    code, out, _ = run(capsys, *slow)
    assert code == 0
    assert "Drafts never overtake" in out
    assert "never" in next(line for line in out.splitlines() if line.startswith("patient"))


def test_a_wrong_acceptance_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *EXAMPLE[:-1], "1")
    assert (code, out) == (2, "")
    assert "acceptance=1.0 is not usable: expected 0 to less than 1" in err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "split", "plan", "--rtt", "40", "--draft-ms", "5")
    assert code == 2
    assert "give --target-ms, --acceptance, or the address of a server" in err
