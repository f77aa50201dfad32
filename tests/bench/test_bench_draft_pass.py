"""A draft is timed beside a plain pass, in the same run."""

from pathlib import Path

from bench.draft_pass import HEAD, cells, measure
from paceline import LLM


def test_a_whole_draft_is_more_than_the_pass_in_it(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), trained=["smollm2-135m-block"])
    (row,) = measure(llm, [(64, 0.0, 5)], prompts=1, repeats=1)
    assert row["tokens_per_pass"]["median"] > 1
    assert 0 < row["own_ms"]["median"] < row["draft_ms"]["median"]
    assert len(cells(row)) == len(HEAD)
