import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.advise.replay import replay
from paceline.config import SpecConfig
from paceline.config import settings as from_outside
from paceline.drafters.suffix import Suffix, SuffixSettings
from paceline.drafters.suffix.drafter import MAX_PUT_OFF
from paceline.errors import DrafterMismatch, UsageError
from paceline.types import Ask, Draft, Seq
from support.grammars import sentence

PHRASE = list(range(100, 120))


def draft_of(
    drafter: Suffix,
    tokens: list[int],
    budget: int = 4,
    after: tuple[int, ...] = (),
    width: int = 1,
    tenant: str = "",
) -> Draft:
    seq = Seq("a", tokens, len(tokens), spec=SpecConfig(tree_width=width), tenant=tenant)
    drafter.begin(seq)
    return drafter.draft([Ask(seq, budget, after)])[0]


def past(drafter: Suffix, tokens: list[int], tenant: str = "", name: str = "past") -> None:
    drafter.end(Seq(name, tokens, 0, tenant=tenant))


def test_the_longest_precedent_in_the_prompt() -> None:
    tokens = [1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 60, 61, 62, 1, 2, 3, 4]
    assert draft_of(Suffix(), tokens, 3).tokens == (50, 51, 52)


def test_the_latest_of_equals() -> None:
    assert draft_of(Suffix(), [7, 1, 2, 50, 7, 1, 2, 60, 8, 7, 1, 2], 1).tokens == (60,)


def test_nothing_is_drafted_without_a_precedent() -> None:
    assert not draft_of(Suffix(), [1, 2, 3])
    assert not draft_of(Suffix(), [])
    assert not draft_of(Suffix(), [*PHRASE, *PHRASE[:9]], budget=0)


def test_nodes_are_signed_and_weighed() -> None:
    draft = draft_of(Suffix(), [*PHRASE, *PHRASE[:9]], 5)
    assert draft.tokens == tuple(PHRASE[9:14])
    assert draft.sources == ("suffix",) * 5
    assert draft.parents is None
    assert len(draft.scores) == 5
    assert all(0 < score < 1 for score in draft.scores)


def test_drafts_of_others_are_continued() -> None:
    tokens = [*PHRASE, 1, 2, 3]
    assert draft_of(Suffix(), tokens, 3, after=tuple(PHRASE[4:8])).tokens == tuple(PHRASE[8:11])


def test_text_of_another_sequence_is_drafted() -> None:
    drafter = Suffix()
    past(drafter, PHRASE)
    assert draft_of(drafter, PHRASE[:6]).tokens == tuple(PHRASE[6:10])


def test_a_sequence_goes_before_the_past_and_a_longer_match_before_both() -> None:
    drafter = Suffix()
    past(drafter, [1, 2, 3, 4, 70])
    assert draft_of(drafter, [3, 4, 60, 3, 4], 1).tokens == (60,)
    assert draft_of(drafter, [3, 4, 60, 2, 3, 4], 1).tokens == (70,)


def test_its_own_output_is_precedent_at_once() -> None:
    drafter = Suffix()
    seq = Seq("a", [1, 2, 3], 3)
    drafter.begin(seq)
    assert not drafter.draft([Ask(seq, 4)])[0]
    seq.tokens += [*PHRASE, *PHRASE[:5]]
    assert drafter.draft([Ask(seq, 4)])[0].tokens == tuple(PHRASE[5:9])


def test_history_that_is_sent_again_is_not_indexed_again() -> None:
    drafter = Suffix()
    history = random.Random(0).choices(range(1000), k=640)
    past(drafter, history)
    seq = Seq("a", [*history, 5, *history[100:110]], 651)
    assert drafter.draft([Ask(seq, 3)])[0].tokens == tuple(history[110:113])
    assert len(drafter._own["a"].index) < 20


def test_new_text_is_found_by_the_history_before_it() -> None:
    drafter = Suffix()
    history = random.Random(0).choices(range(1000), k=64)
    past(drafter, history)
    seq = Seq("a", [*history, *PHRASE, 5, *history[-4:]], 89)
    draft = drafter.draft([Ask(seq, 3)])[0]
    assert draft.tokens == tuple(PHRASE[:3])
    assert draft.scores[0] > 0.6  # four tokens in common, not one


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 3))
def test_a_text_that_grew_is_as_one_that_came_at_once(tokens: list[int], step: int) -> None:
    drafter, seq = Suffix(), Seq("grown", [], 0)
    for start in range(0, len(tokens), step):
        seq.tokens += tokens[start : start + step]
        assert drafter.draft([Ask(seq, 8)])[0] == draft_of(Suffix(), list(seq.tokens), 8)


def test_tenants_never_share_a_draft() -> None:
    drafter = Suffix()
    past(drafter, PHRASE, tenant="a")
    assert draft_of(drafter, PHRASE[:6], tenant="a")
    assert not draft_of(drafter, PHRASE[:6], tenant="b")
    assert not draft_of(drafter, PHRASE[:6])


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), max_size=40)), max_size=6),
    st.integers(1, 3),
)
def test_a_tenant_gets_drafts_as_if_alone(learnt: list[tuple[bool, list[int]]], width: int) -> None:
    together, alone = Suffix(), Suffix()
    for other, tokens in learnt:
        past(together, tokens, tenant="other" if other else "me")
        if not other:
            past(alone, tokens, tenant="me")
    for tokens in ([0, 1], [2, 3, 1], [1, 1, 1]):
        assert draft_of(together, tokens, 8, width=width, tenant="me") == draft_of(
            alone, tokens, 8, width=width, tenant="me"
        )


def test_what_is_private_is_not_learnt() -> None:
    drafter = Suffix()
    drafter.end(Seq("secret", list(PHRASE), len(PHRASE), remember=False))
    drafter.end(Seq("stranger", list(PHRASE), len(PHRASE), anonymous=True))
    assert len(drafter.memory) == 0
    past(drafter, PHRASE, name="open")
    assert draft_of(drafter, PHRASE[:6])


def test_learning_can_be_off() -> None:
    drafter = Suffix(SuffixSettings(remember=False))
    past(drafter, PHRASE)
    assert not draft_of(drafter, PHRASE[:6])
    assert draft_of(drafter, [*PHRASE, *PHRASE[:6]])


def test_memory_is_bounded_and_sequences_are_let_go() -> None:
    drafter = Suffix(SuffixSettings(max_tokens=500))
    for i in range(20):
        replay(drafter, [i, *PHRASE, i + 1], [*PHRASE, i], tenant=str(i % 3))
        assert len(drafter.memory) <= 500
    assert not drafter._own


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12), st.integers(1, 4))
def test_the_shape_of_a_draft(tokens: list[int], budget: int, width: int) -> None:
    draft = draft_of(Suffix(SuffixSettings(min_chance=0.01)), tokens, budget, width=width)
    assert len(draft) == len(draft.sources) == len(draft.scores) <= budget
    for node in range(-1, len(draft)):
        children = draft.children(node)
        assert all(child > node for child in children)
        assert len({draft.tokens[child] for child in children}) == len(children) <= width


def test_a_tree_holds_both_continuations() -> None:
    tokens = [1, 2, 3, 50, 51, 9, 1, 2, 3, 60, 61, 8, 1, 2, 3]
    draft = draft_of(Suffix(SuffixSettings(min_chance=0.01)), tokens, 12, width=2)
    assert {draft.tokens[node] for node in draft.children(-1)} == {50, 60}
    assert draft.tokens[0] == 60


def test_texts_are_remembered_while_passes_run_beside_the_host() -> None:
    """Others need not wait for that; the next text of their tenant does."""
    drafter = Suffix()
    past(drafter, PHRASE, name="at once")
    assert not drafter._ended
    drafter.idle()
    running = Seq("running", [1, 2, 3, *PHRASE[:6]], 9, tenant="acme")
    drafter.draft([Ask(running, 4)])
    past(drafter, PHRASE, tenant="acme")
    past(drafter, PHRASE[::-1], tenant="other")
    assert not drafter.draft([Ask(running, 4)])[0]
    drafter.idle()
    assert drafter.draft([Ask(running, 4)])[0].tokens == tuple(PHRASE[6:10])
    assert draft_of(drafter, PHRASE[15:9:-1], tenant="other").tokens == tuple(PHRASE[9:5:-1])
    past(drafter, [5, 6, 7, 8], tenant="acme")
    assert len(drafter.memory) == len(drafter._memory) > 0
    assert not drafter._ended
    for i in range(MAX_PUT_OFF + 5):
        past(drafter, [i, i + 1, i + 2], tenant=f"{i}")
    assert len(drafter._ended) == MAX_PUT_OFF


def test_what_was_indexed_for_a_text_is_freed_when_it_is_remembered() -> None:
    """Freeing it takes time, which no pass need wait for."""
    drafter = Suffix()
    drafter.idle()
    seq = Seq("ends", [1, 2, 3], 3, tenant="acme")
    drafter.draft([Ask(seq, 4)])
    own = drafter._own["ends"]
    drafter.end(seq)
    assert [kept for _, _, kept in drafter._ended] == [own]
    drafter.idle()
    assert not drafter._own
    assert not drafter._ended


def test_under_a_grammar_the_legal_precedent_is_followed() -> None:
    tokens = [1, 2, 3, 50, 51, 9, 1, 2, 3, 60, 61, 8, 1, 2, 3]
    seq, drafter = Seq("a", tokens, len(tokens)), Suffix(SuffixSettings(min_chance=0.01))
    assert drafter.draft([Ask(seq, 2)])[0].tokens == (60, 61)
    assert drafter.draft([Ask(seq, 2, (), sentence({50, 52}, {51, 52}))])[0].tokens == (50, 51)
    assert drafter.draft([Ask(seq, 2, (), sentence({50, 52}, {52, 53}))])[0].tokens == (50,)
    assert not drafter.draft([Ask(seq, 2, (), sentence({52}))])[0]
    assert not drafter.draft([Ask(seq, 2, (), sentence())])[0]


def test_it_remembers_across_runs(tmp_path: Path) -> None:
    drafter, later = Suffix(), Suffix()
    past(drafter, PHRASE, tenant="acme")
    drafter.save(tmp_path / "memory", "tok")
    later.load(tmp_path / "memory", "tok")
    assert draft_of(later, PHRASE[:6], tenant="acme").tokens == tuple(PHRASE[6:10])
    with pytest.raises(DrafterMismatch):
        later.load(tmp_path / "memory", "other")
    assert draft_of(later, PHRASE[:6], tenant="acme")  # what was there is untouched


def test_settings_must_be_usable() -> None:
    for name in ("max_tokens", "max_depth", "min_chance"):
        with pytest.raises(UsageError, match=f"{name}=-1"):
            from_outside(SuffixSettings, {name: -1})


def test_learn_is_the_old_name_of_remember() -> None:
    with pytest.warns(DeprecationWarning, match="learn is now called remember"):
        assert SuffixSettings(learn=False) == SuffixSettings(remember=False)
