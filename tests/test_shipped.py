"""The drafters in the package fit their models, draft well, and are never changed in place."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from paceline import LLM, EngineConfig, SpecConfig
from paceline.cli import main
from paceline.errors import ModelError, UsageError
from paceline.heads import versions
from paceline.heads.head_checkpoint import CARD, WEIGHTS, read_card
from paceline.heads.local_heads import SHIPPED, available_heads, drafter_path, output_path, shipped
from paceline.loading import copy_to_store, find_heads, model_fingerprint

NAME = "smollm2-135m-block"
MOST_BYTES = 14 << 20
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {word: {"type": "string"} for word in words},
                "required": words,
            },
        },
    }
    for name, what, words in (
        ("reserve_table", "Reserve a table in a restaurant.", ["restaurant", "day", "name"]),
        ("cancel_table", "Cancel a reservation.", ["restaurant", "day"]),
    )
]
REQUESTS = (
    "Please reserve a table at the Blue Lantern on Friday for Marta Jensen.",
    "Cancel what I have at Casa Verde on Sunday.",
    "We would like to eat at Noodle House on Tuesday. My name is Omar Haddad.",
)


def test_they_are_small_and_say_where_they_come_from() -> None:
    assert [folder.name for folder in shipped()] == [NAME]
    for folder in shipped():
        assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES
        assert {file.name for file in folder.iterdir()} == {CARD, WEIGHTS}
        card = read_card(folder)
        assert card.weights == "int8"
        assert card.data["answers"] > 10_000
        assert "/" not in json.dumps(card.data["sources"])


def test_their_shares_are_of_the_tokens_that_they_say() -> None:
    """A share times its count is a whole number, and each position follows the accepted ones of the last."""
    for card in map(read_card, shipped()):
        accepted = [round(share * n) for share, n in zip(card.acceptance, card.counts, strict=True)]
        assert [k / n for k, n in zip(accepted, card.counts, strict=True)] == list(card.acceptance)
        ended = [k - n for k, n in zip(accepted, card.counts[1:], strict=False)]  # with their text
        assert all(0 <= count <= card.data["measured_answers"] for count in ended)
        assert card.counts[0] == sum(kind["anchors"] for kind in card.data["by_kind_of_text"].values())
        assert all(
            low < share < high for share, (low, high) in zip(card.acceptance, card.intervals(), strict=True)
        )


@pytest.mark.model
def test_each_is_listed_beside_its_model(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["drafters", "--json"])
    assert not end.value.code
    found = json.loads(capsys.readouterr().out)["trained"]
    assert [one["suits"] for one in found if one["name"] == NAME] == [True]


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tool_calls_of_tools_it_never_saw(smollm2_path: Path, temperature: float) -> None:
    llm = LLM("smollm2-135m", trained=[NAME], config=EngineConfig("cpu"))
    tokens = passes = 0
    for seed, request in enumerate(REQUESTS):
        ways = [SpecConfig(("block",), 5, adaptive=False), SpecConfig(("none",))]
        drafted, plain = (
            llm.generate(
                [{"role": "user", "content": request}],
                tools=TOOLS,
                tool_choice="required",
                max_tokens=64,
                temperature=temperature,
                seed=seed,
                spec=spec,
            )
            for spec in ways
        )
        assert drafted.token_ids == plain.token_ids
        tokens, passes = tokens + len(drafted.token_ids), passes + drafted.passes
    assert tokens / passes > 2


def test_one_trained_here_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert drafter_path(NAME) == SHIPPED / NAME
    assert output_path(NAME) == tmp_path / "drafters" / NAME
    (found,) = find_heads([NAME])
    assert found.root == SHIPPED / NAME
    copy = copy_to_store(found)
    assert copy.root == copy.version.folder == drafter_path(NAME) == tmp_path / "drafters" / NAME
    assert available_heads() == [copy.root]
    assert (copy.root / WEIGHTS).read_bytes() == (SHIPPED / NAME / WEIGHTS).read_bytes()
    assert copy_to_store(copy) == copy_to_store(found) == copy
    assert [path.name for path in copy.root.parent.iterdir()] == [NAME]
    (copy.root / CARD).unlink()  # as while it is being trained
    with pytest.raises(UsageError, match=r"has no drafter yet.*finish its training"):
        copy_to_store(found)


def test_two_processes_may_copy_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    (found,) = find_heads([NAME])

    def copied_meanwhile(source: Path, goal: Path) -> Path:
        if not (tmp_path / "drafters" / NAME).exists():
            copytree(source, tmp_path / "drafters" / NAME)
        return Path(copytree(source, goal))

    monkeypatch.setattr("paceline.loading.copytree", copied_meanwhile)
    assert copy_to_store(found).root == tmp_path / "drafters" / NAME
    assert [path.name for path in (tmp_path / "drafters").iterdir()] == [NAME]


@pytest.mark.parametrize(
    "change", [lambda root: versions.use(root, 0), lambda root: versions.making(root).__enter__()]
)
def test_nothing_is_written_into_the_package(change: Callable[[Path], object]) -> None:
    for root in (SHIPPED / NAME, SHIPPED / ".." / "shipped" / NAME):
        with pytest.raises(UsageError, match="part of the package"):
            change(root)
    assert {file.name for file in (SHIPPED / NAME).iterdir()} == {CARD, WEIGHTS}


def test_it_serves_those_who_name_it_alone(smollm2_path: Path) -> None:
    default = SpecConfig().drafters
    assert LLM(str(smollm2_path)).spec.drafters == default
    assert LLM(str(smollm2_path), trained=NAME).spec.drafters == (*default, "block")
    named = LLM(str(smollm2_path), spec=SpecConfig(("suffix",)))
    assert not named.trained
    assert named.spec.drafters == ("suffix",)


def test_a_model_that_cannot_be_read_has_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.loading.open_checkpoint", Path.read_bytes)
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        model_fingerprint(tmp_path)
