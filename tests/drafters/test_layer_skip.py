"""The target as its own drafter: which layers it leaves out, and when it stops."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SamplingParams, SpecConfig
from paceline.drafters.draft_model import SelfDrafter
from paceline.drafters.draft_model.layer_search import (
    LayerSet,
    expected_speed,
    find_layers,
    known_layers,
    layers_for,
    search,
)
from paceline.drafters.draft_model.layer_skip import MAX_PENDING, skip_cost
from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.grammar import Grammar
from paceline.errors import CacheFull, UsageError
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import NO_DRAFT, Ask, Draft, Feed, Scores, Seq

VOCAB = 24
TEXTS = [[(5 * i * i + 3 * i) % VOCAB for i in range(90)], [(7 * i) % VOCAB for i in range(50)]]


class Layered(ToyTarget):
    """Half of its layers, those with odd numbers, do nothing."""

    layers = 8
    layer_share = 0.1

    def skip_forward(self, feeds: Sequence[Feed], starts: Sequence[int], layers: Sequence[int]) -> Scores:
        missed = [layer for layer in range(0, self.layers, 2) if layer not in layers]
        return super().skip_forward(feeds, starts, range(self.layers - len(missed)))


@pytest.fixture
def target() -> ToyTarget:
    return ToyTarget(VOCAB)


def opened(target: ToyTarget, tokens: Sequence[int], computed: int, temperature: float = 0.0) -> Seq:
    spec = SpecConfig(("self",))
    seq = Seq("s", list(tokens), len(tokens), SamplingParams(temperature=temperature, seed=3), spec)
    target.open(seq)
    if computed:
        target.forward([Feed("s", tokens[:computed], scored=False)])
        target.keep("s", computed)
    seq.computed = computed
    return seq


def test_the_layers_that_do_nothing_are_left_out() -> None:
    target = Layered(VOCAB)
    steps: list[tuple[int, int]] = []
    found = search(target, TEXTS, lambda done, total: steps.append((done, total)))
    assert found == LayerSet((0, 2, 4, 6), 1.0, expected_speed(1.0, 0.6))
    assert steps == [(i + 1, len(steps)) for i in range(len(steps))]
    assert search(target, TEXTS) == found
    assert not target._seqs


def test_text_that_is_too_short_is_refused(target: ToyTarget) -> None:
    with pytest.raises(UsageError, match="expected 32 or more"):
        search(target, [[1, 2, 3], list(range(20))])
    assert not target._seqs


def test_a_search_that_breaks_off_leaves_nothing_open(target: ToyTarget) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(target, TEXTS, stop)
    assert not target._seqs


def test_speed_rises_with_agreement_and_falls_with_cost() -> None:
    assert expected_speed(1.0, 0.0) == pytest.approx(9 / 1.32)
    assert expected_speed(0.9, 0.3) > expected_speed(0.8, 0.3) > expected_speed(0.8, 0.4)
    assert expected_speed(0.6, 0.7) < 1


def test_what_was_found_is_known_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    target = Layered(VOCAB)
    assert known_layers(target, "print") is None
    found = find_layers(target, "print", TEXTS)
    assert known_layers(target, "print") == found
    assert known_layers(target, "another") is None
    passes = target.passes
    assert layers_for(target, "print", list) == found.layers
    assert target.passes == passes
    assert layers_for(target, "another", lambda: TEXTS) == found.layers


@pytest.mark.parametrize(
    "noted", ["{", "[]", {"layers": []}, {"layers": [1, 0]}, {"layers": [9]}, {"layers": "x"}, [1], None]
)
def test_notes_that_make_no_sense_count_for_nothing(
    noted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    if isinstance(noted, dict):
        noted |= {"agreement": 1, "speed": 1}
    said = noted if isinstance(noted, str) else json.dumps({"print": noted})
    (tmp_path / "layers.json").write_text(said)
    assert known_layers(Layered(VOCAB), "print") is None


def test_a_prompt_is_not_read_twice(target: ToyTarget) -> None:
    drafter = SelfDrafter(target, (0, 1, 2))
    seq = opened(target, range(MAX_PENDING + 1), 0)
    assert drafter.draft([Ask(seq, 4)]) == [NO_DRAFT]
    target.forward([Feed("s", [0], scored=False)])
    target.keep("s", 1)
    seq.computed = 1
    assert len(drafter.draft([Ask(seq, 4)])[0]) > 0


@pytest.mark.parametrize("cursor", [None, ToyCursor(lambda said: set(range(VOCAB)))])
def test_a_chain_ends_where_one_more_token_costs_more_than_it_gains(
    target: ToyTarget, cursor: ToyCursor | None
) -> None:
    """Greedy decoding has a law that is always sure; what counts is how sure the model is."""
    seq = opened(target, [1, 2, 3], 2)
    drafter = SelfDrafter(target, (0, 1, 2))
    assert drafter._cost == skip_cost(target, 3) == pytest.approx(0.8)
    (draft,) = drafter.draft([Ask(seq, 8, cursor=cursor)])
    assert 1 <= len(draft) < 8
    drafter._cost = 0.0
    (longer,) = drafter.draft([Ask(seq, 8, cursor=cursor)])
    assert len(longer) == 8
    assert longer.tokens[: len(draft)] == draft.tokens


def test_a_full_cache_costs_only_the_drafts(target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Scores:
        raise CacheFull("full")

    monkeypatch.setattr(target, "skip_forward", full)
    assert SelfDrafter(target, (0,)).draft([Ask(opened(target, [1, 2], 1), 4)]) == [NO_DRAFT]


def allowed() -> Iterator[set[int]]:
    yield from ({1}, {2}, {3, 4, 5}, {6}, {7}, set(range(VOCAB)), set())


def test_it_takes_turns_with_a_grammar(target: ToyTarget) -> None:
    """Its second leg is sketched after what the grammar has put behind the first."""
    rules = list(allowed())
    relay = DrafterList([Grammar(), SelfDrafter(target, range(4))])
    seq = opened(target, [1, 2, 3], 2, temperature=0.8)
    (draft,) = relay.draft([Ask(seq, 3, (), ToyCursor(lambda said: rules[len(said)]), 9)])
    assert draft.sources == ("grammar", "grammar", "self", "grammar", "grammar", "self")
    wanted: Draft = draft
    for node, token in enumerate(wanted.tokens):
        assert token in rules[node]
