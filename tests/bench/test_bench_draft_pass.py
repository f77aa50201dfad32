"""A draft is timed beside a plain pass, in the same run."""

from pathlib import Path

import pytest

from bench.drafters.draft_pass import COLUMNS, measure
from bench.table import Table
from paceline import LLM, EngineConfig


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_whole_draft_is_more_than_the_pass_in_it(
    smollm2_path: Path, dtype: str, temperature: float
) -> None:
    llm = LLM(str(smollm2_path), trained=["smollm2-135m-block"], config=EngineConfig(dtype=dtype))
    (row,) = measure(llm, [(64, temperature, 5)], prompts=1, repeats=1)
    assert row["tokens_per_pass"]["median"] >= 1
    assert 0 < row["own_ms"]["median"] < row["draft_ms"]["median"]
    assert all(Table.of(COLUMNS, [row]).rows[0])


def test_another_kind_is_refused(smollm2_path: Path) -> None:
    with pytest.raises(SystemExit, match="give a drafter of kind block"):
        next(measure(LLM(str(smollm2_path)), [(64, 0.0, 5)], prompts=1, repeats=1))
