"""Versions of a drafter: one serves, earlier ones can be gone back to, and none that matters is ever lost."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_heads import random_net, tiny_model

from paceline.errors import CorruptModel, UnknownModel
from paceline.heads import versions
from paceline.heads.folder import Card, read_card, save, save_card

NET = random_net(draft_vocab=60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "mine", Card("block", NET.shape, "tiny", tiny_model().fingerprint), NET)
    return tmp_path / "mine"


def learned(root: Path, source: int | None = None, most: int = versions.MOST) -> int:
    """A further version, which does not serve yet."""
    with versions.making(root) as folder:
        data = {} if source is None else {"learned": {"from": source}}
        save(folder, replace(read_card(root), data=data), NET)
        return versions.add(root, folder, most)


def test_at_first_it_serves_as_it_was_trained(root: Path) -> None:
    assert versions.current(root) == versions.Version(0, root)
    assert versions.numbers(root) == [0]


def test_a_version_serves_once_it_is_named(root: Path) -> None:
    assert learned(root) == 1
    assert versions.current(root).number == 0
    versions.use(root, 1)
    assert versions.current(root) == versions.Version(1, root / "versions" / "0001")
    with pytest.raises(UnknownModel, match="no version 7: expected one of 0, 1"):
        versions.use(root, 7)
    assert versions.current(root).number == 1


def test_going_back_leads_to_what_it_was_learned_from(root: Path) -> None:
    for number, source in ((1, 0), (2, 1), (3, 1)):
        assert learned(root, source) == number
        versions.use(root, number)
    assert versions.before(root) == 1
    shutil.rmtree(root / "versions" / "0001")
    assert versions.before(root) == 2
    versions.use(root, 0)
    with pytest.raises(UnknownModel, match="no version before that"):
        versions.before(root)


@given(most=st.integers(1, 4), uses=st.lists(st.booleans(), min_size=1, max_size=8))
def test_few_are_kept_and_never_without_the_current(
    tmp_path_factory: pytest.TempPathFactory, most: int, uses: list[bool]
) -> None:
    root = tmp_path_factory.mktemp("versions")
    save_card(root, Card("block", NET.shape, "tiny", "mark"))
    for used in uses:
        serving = versions.current(root).number
        with versions.making(root) as folder:
            save_card(folder, read_card(root))
            new = versions.add(root, folder, most)
        assert {0, serving, new} <= set(versions.numbers(root))
        assert len(versions.numbers(root)) <= 1 + max(most, 2)
        assert versions.current(root).number == serving
        if used:
            versions.use(root, new)
    assert new == len(uses)  # no number is ever given twice


def test_one_that_is_trained_anew_begins_anew(root: Path) -> None:
    learned(root)
    versions.use(root, 1)
    save_card(root, replace(read_card(root), data={"answers": 5}))
    assert versions.current(root).number == 0


def test_damage_is_told_with_the_way_back(root: Path) -> None:
    learned(root)
    versions.use(root, 1)
    shutil.rmtree(root / "versions" / "0001")
    with pytest.raises(CorruptModel, match=r"lost its version 1: .*`paceline drafters rollback mine 0`"):
        versions.current(root)
    (root / versions.POINTER).write_text("{")
    with pytest.raises(CorruptModel, match="damaged"):
        versions.current(root)
    versions.use(root, 0)
    assert versions.current(root).number == 0


def test_what_was_never_finished_goes(root: Path) -> None:
    gone = root / "versions" / ".making-999999999"
    gone.mkdir(parents=True)
    with versions.making(root) as folder:
        assert not gone.exists()
        assert folder.name == f".making-{os.getpid()}"
        save_card(folder, read_card(root))
    assert list((root / "versions").iterdir()) == []
    assert json.loads((root / "drafter.json").read_text())["kind"] == "block"
