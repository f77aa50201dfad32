"""A draft is timed beside a plain pass, in the same run."""

from pathlib import Path

import pytest

from bench.drafters import draft_pass
from bench.drafters.draft_pass import COLUMNS, measure
from bench.table import Table
from paceline import LLM, EngineConfig


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_draft_and_the_pass_in_it_are_timed(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(draft_pass, "NEW_TOKENS", 8)
    llm = LLM(str(smollm2_path), trained=["smollm2-135m-block"], config=EngineConfig(dtype=dtype))
    rows = list(measure(llm, [(64, 0.0, 5), (64, 0.7, 5)], prompts=1, repeats=1))
    assert [row["temperature"] for row in rows] == [0.0, 0.7]
    for row in rows:
        assert row["tokens_per_pass"]["median"] >= 1
        assert min(row["own_ms"]["median"], row["draft_ms"]["median"]) > 0
        assert all(Table.of(COLUMNS, [row]).rows[0])


def test_another_kind_is_refused(smollm2_path: Path) -> None:
    with pytest.raises(SystemExit, match="give a drafter of kind block"):
        next(measure(LLM(str(smollm2_path)), [(64, 0.0, 5)], prompts=1, repeats=1))
