"""The registry of drafters: complete, in step with the docs, and right about what a model can use."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig, SpecConfig
from paceline.drafters import DRAFTERS, NEEDS, TARGET_DRAFTERS, model_free
from paceline.errors import DrafterMismatch
from paceline.heads.registry import HEAD_TYPES
from paceline.loading import load_model, unusable
from paceline.types import Ask, Seq

DOCS = Path(__file__).parents[2] / "docs" / "drafters.md"


def test_every_drafter_is_in_it() -> None:
    assert set(DRAFTERS) == {*model_free(), "model", *TARGET_DRAFTERS, *HEAD_TYPES}
    assert all(info.about and info.needs in NEEDS for info in DRAFTERS.values())
    assert {name for name, info in DRAFTERS.items() if info.needs == "trained"} == set(HEAD_TYPES)


def test_the_table_in_the_docs_has_the_same_drafters() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCS.read_text().split("```")[0], re.MULTILINE)
    assert sorted(rows) == sorted(DRAFTERS)


@pytest.mark.model
def test_a_model_of_four_bits_cannot_use_a_copy_in_four_bits(smollm2_path: Path) -> None:
    reason = unusable("quantized", smollm2_path)
    assert reason is not None
    with pytest.raises(DrafterMismatch, match=re.escape(reason)):  # before any weights are read
        load_model(smollm2_path, spec=SpecConfig(("quantized",)), config=EngineConfig())


@pytest.mark.model
def test_a_draft_model_must_be_smaller_than_its_target(smollm2_path: Path) -> None:
    reason = unusable("model", smollm2_path, draft_model=smollm2_path)
    assert reason is not None
    assert "no smaller than" in reason
    assert unusable("model", smollm2_path) is None
    assert all(unusable(name, smollm2_path) is None for name in DRAFTERS if name != "quantized")


def test_a_draft_model_that_cannot_be_read_is_not_usable(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("not JSON")
    assert unusable("model", tmp_path, draft_model=tmp_path) is not None


@pytest.mark.parametrize("name", ["suffix", "ngram"])
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), max_size=5))
def test_a_drafter_that_has_prepared_for_a_prompt_drafts_the_same(
    name: str, prompt: list[int], output: list[int]
) -> None:
    drafts = []
    for prepares in (False, True):
        drafter = model_free()[name]
        for number in range(2):  # the second finds the first in the memory
            seq = Seq(f"s{number}", list(prompt), len(prompt), tenant="t")
            drafter.begin(seq)
            for _ in range(2 * prepares):
                drafter.prepare(seq)
            for token in output:
                seq.tokens.append(token)
                drafts.append((prepares, drafter.draft([Ask(seq, 5)])[0]))
            drafter.end(seq)
    assert [d for prepared, d in drafts if prepared] == [d for prepared, d in drafts if not prepared]
