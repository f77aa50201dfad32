"""Figures of the table of drafters, machines side by side, and what was measured elsewhere put beside."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import pages, results_folder
from bench.drafters import command as drafters
from bench.drafters import rows as drafter_rows
from bench.drafters.arms import PLAIN, Arm, Stock
from bench.drafters.rows import FIGURES, comparable, rows, section, table, verdicts
from bench.drafters.runs import Figures, Lane, Outcome, Sample
from bench.drafters.turns import CHAT
from bench.pages import results_page

NONE, BLOCK = Arm(PLAIN, (PLAIN,)), Arm("block", ("block",))


def sample(arm: Arm, planned: bool, repeat: int, seconds: float, text: tuple[int, ...] = (1, 2)) -> Sample:
    """Ten tokens; a pass of the target takes 50 ms, a draft a third of that."""
    passes = 10 if arm is NONE else 4
    draft = 0 if arm is NONE else 16_667
    asked = passes if draft else 0
    figures = Figures(10, passes, 6 * passes, asked, draft * passes, 50_000 * passes, seconds)
    return Sample(Lane(arm, 0.0, planned), repeat, "chat a", CHAT, text, figures)


def outcome() -> Outcome:
    found = Outcome(repeats=2)
    for repeat, plain, again, guessed in ((0, 1.0, 1.1, 0.5), (1, 1.2, 1.2, 0.4)):
        found.samples += [
            sample(NONE, False, repeat, plain),
            sample(NONE, True, repeat, again),
            sample(BLOCK, False, repeat, 2.0),
            sample(BLOCK, True, repeat, guessed, (1, 2 + repeat)),
        ]
    return found


def test_figures() -> None:
    plain, block = rows(outcome(), [NONE, BLOCK], Stock(mb={"block": 64.04}), [0.0])
    assert plain["times_plain"] == {"median": 0.955, "low": 0.909, "high": 1.0}
    assert (plain["draft_cost"], plain["tokens_per_pass"]) == (None, 1.0)
    assert block["times_plain"] == {"median": 2.5, "low": 2.0, "high": 3.0}
    assert (block["tokens_per_pass"], block["rows_per_pass"]) == (2.5, 6.0)
    assert (block["draft_cost"], block["memory_mb"]) == (0.333, 64.0)
    assert block["other_cost"] == pytest.approx((500 - 50 - 16.667 - (110 - 50)) / 50, abs=1e-3)
    assert (block["equal"], block["compared"]) == (3, 4)
    shown = drafter_rows.cells(block)
    assert shown == ["2.50", "2.50", "0.33", "7.47", "2.50 (2.00 to 3.00)", "64", "NO: 1 of 4 differ"]


def result(device: str, names: dict[str, tuple[float, float]], model: str = "m") -> dict[str, Any]:
    """names: each drafter's lowest and highest speed."""
    (base,) = rows(outcome(), [BLOCK], Stock(), [0.0])
    found = []
    for name, (low, high) in names.items():
        spread = {"median": low, "low": low, "high": high}
        found.append({**base, "drafters": name, "times_plain": spread, "equal": 4})
    facts = {"model": model, "fingerprint": "f", "device": device, "where": "here", "gpu": "A GPU"}
    machine = {**facts, "date": "2026-01-02", "commit": "abc", "cpu": "a cpu", "cores": 2}
    settings = {"turns": 1, "repeats": 2, "max_tokens": 9, "length": 5, "width": 4}
    command = f"python -m bench drafters --device {device}"
    return {"machine": machine, "command": command, "settings": settings, "left_out": [], "rows": found}


def test_machines_stand_side_by_side() -> None:
    cpu, gpu = result("cpu", {PLAIN: (1, 1), "self": (1, 2)}), result("cuda", {PLAIN: (1, 1), "tree": (3, 3)})
    made = table([cpu, gpu])
    head, lines = made.head, made.rows
    names = [column.title for column in FIGURES]
    assert head[3:] == [*(f"CPU: {name}" for name in names), *(f"A GPU: {name}" for name in names)]
    assert [line[2] for line in lines] == [PLAIN, "self", "tree"]
    assert lines[1][3 + len(FIGURES) :] == lines[2][3 : 3 + len(FIGURES)] == ["-"] * len(FIGURES)
    assert all(len(line) == len(head) for line in lines)


def test_a_second_run_of_a_machine_is_a_table_of_its_own() -> None:
    cpu, gpu = result("cpu", {"suffix": (1, 1)}), result("cuda", {"suffix": (2, 2)})
    trees = result("cuda", {"suffix": (5, 5), "tree": (6, 6)})
    assert comparable([cpu, gpu, trees]) == [[cpu, gpu], [trees]]
    lines = [line for line in section([cpu, gpu, trees]) if line.startswith("|")]
    heads = [at for at, line in enumerate(lines) if line.startswith("| prompts")]
    assert len(heads) == 2
    assert not any("5.00" in line or "6.00" in line for line in lines[: heads[1]])
    assert "5.00" in lines[heads[1] + 2]
    assert "6.00" in lines[heads[1] + 3]


def test_a_drafter_pays_if_it_is_beyond_the_noise() -> None:
    found = result("cpu", {PLAIN: (0.9, 1.2), "near": (1.1, 1.3), "far": (1.21, 3), "slow": (0.5, 2)})
    assert verdicts(found) == [
        "Faster than plain decoding everywhere: `far`.",
        "Faster nowhere, so not worth using here: `near`, `slow`.",
    ]
    found["settings"]["repeats"] = 1
    assert verdicts(found) == ["One repeat only, which cannot tell a drafter's gain from noise."]


def test_what_another_machine_wrote_is_put_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_folder, "FOLDER", tmp_path / "results")
    written: list[str] = []
    monkeypatch.setattr(pages, "write", lambda: written.extend(results_page.sections()))
    results_folder.write(result("cpu", {"suffix": (1, 2)}), "drafters-m-cpu")
    elsewhere = tmp_path / "found.json"
    elsewhere.write_text(json.dumps(result("cuda", {"suffix": (3, 4)}, model="n")))
    drafters.main(["--merge", str(elsewhere), "--write"])
    assert sorted(path.name for path in results_folder.FOLDER.iterdir()) == [
        "drafters-m-cpu.json",
        "drafters-n-cuda.json",
    ]
    assert sum(line.startswith("## ") for line in written) == 1
    page = "\n".join(written)
    assert "CPU: `python -m bench drafters --device cpu`, 2026-01-02, commit abc, a cpu" in page
    assert "A GPU: `python -m bench drafters --device cuda`, 2026-01-02, commit abc, a cpu" in page
    assert (
        "1.00 (1.00 to 2.00) | 0 | yes | 2.50 | 2.50 | 0.33 | 7.47 | 3.00 (3.00 to 4.00) | 0 | yes |" in page
    )
