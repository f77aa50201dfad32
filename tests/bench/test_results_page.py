"""Every kind of kept result has its section in docs/numbers.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import results_folder
from bench.pages import gpu, results_page

MACHINE = {"model": "m", "date": "2026-01-02", "commit": "abc", "cpu": "a cpu", "cores": 2}


def keep(folder: Path, name: str, **more: Any) -> None:
    (folder / f"{name}.json").write_text(
        json.dumps({"machine": MACHINE, "command": "python -m bench", **more})
    )


def test_sections_say_machine_date_commit_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_folder, "FOLDER", tmp_path)
    assert results_page.sections() == []
    spread = {"median": 2.0, "low": 1.0, "high": 3.0}
    curve = {"context": 300, "rows": 8, "what": "8 rows after 300, ms", "paceline": spread, "ratio": spread}
    floor = {"gb_per_s": 20.0, "weights_mb": 100.0, "floor_ms": 5.0}
    keep(tmp_path, "passes-m", rows=[curve], floor=floor)
    figures = {"mean_kl": 1e-3, "median_kl": 1e-4, "max_kl": 1e-2, "same_first_choice": 0.99, "positions": 9}
    keep(tmp_path, "divergence-m", rows={"paceline": figures})
    read = {
        "context": 4000,
        "ms": spread,
        "times_first": 1.3,
        "weights_mmac": 1310.0,
        "attention_mmac": 344.1,
    }
    keep(tmp_path, "reading-m", rows=[read])
    timed = ("target_ms", "own_ms", "own_share", "draft_ms", "draft_share", "tokens_per_pass")
    draft = {"context": 512, "temperature": 0.7, "guesses": 5, **dict.fromkeys(timed, spread)}
    keep(tmp_path, "draft_pass-m", rows=[draft])
    page = "\n".join(results_page.sections())
    assert page.count("`python -m bench`, 2026-01-02, commit abc, a cpu, 2 cores") == 4
    assert "| 4000 | 2.00 (1.00 to 3.00) | 1.30 | 1310 | 344 |" in page
    assert "| 512 tokens | 0.7 | 5 | 2.00 (1.00 to 3.00) | 2.00 (1.00 to 3.00) | 2.0 (1.0 to 3.0) % |" in page
    assert "| 8 rows after 300, ms | 2.00 (1.00 to 3.00) |" in page
    assert "| paceline | 1.00e-03 |" in page


def test_passes_of_a_gpu_that_are_not_deterministic_have_rows_of_their_own() -> None:
    row = {"part": "batches", "shape": "8b", "context": "300", "sequences": 64, "rows": 1}
    rows = [{**row, "deterministic": True, "ms": 7.0}, {**row, "deterministic": False, "ms": 6.0}]
    lines = gpu.batches({"machine": {"commit": "abc"}, "rows": [*rows, {**row, "ms": 8.0, "commit": "def"}]})
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if "300" in line]
    found = [(name, ms, commit) for _, name, _, _, ms, commit, _ in cells]
    assert found == [("8b", "7.00", "abc"), ("8b, not deterministic", "6.00", "abc"), ("8b", "8.00", "def")]
