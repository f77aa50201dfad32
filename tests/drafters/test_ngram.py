import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.ngram import Ngram
from paceline.errors import UsageError
from paceline.types import Ask, Draft, Seq


def draft_of(drafter: Ngram, tokens: list[int], budget: int = 4, after: tuple[int, ...] = ()) -> Draft:
    return drafter.draft([Ask(Seq("a", tokens, len(tokens)), budget, after)])[0]


def test_what_followed_the_latest_time() -> None:
    tokens = [1, 2, 3, 8, 8, 1, 2, 3, 9, 7, 5, 1, 2, 3]
    assert draft_of(Ngram(), tokens).tokens == (9, 7, 5, 1)


def test_longer_runs_go_first() -> None:
    tokens = [1, 2, 3, 4, 50, 51, 9, 3, 4, 60, 61, 1, 2, 3, 4]
    assert draft_of(Ngram(), tokens, 2).tokens == (50, 51)
    assert draft_of(Ngram(sizes=(2,)), tokens, 2).tokens == (60, 61)


def test_nothing_is_drafted_without_a_precedent() -> None:
    assert not draft_of(Ngram(), [1, 2, 3, 4, 5])
    assert not draft_of(Ngram(), [])
    assert not draft_of(Ngram(), [1, 2, 9, 1, 2], budget=0)


def test_drafts_of_others_are_continued() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert draft_of(Ngram(), tokens, 2, after=(3, 4)).tokens == (5, 6)


def test_a_copy_goes_on_into_itself() -> None:
    assert draft_of(Ngram(), [4, 5, 4, 5], 5).tokens == (4, 5, 4, 5, 4)
    assert draft_of(Ngram(), [3, 4, 5], 4, after=(3, 4)).tokens == (5, 3, 4, 5)


def test_every_node_is_signed_and_weighed() -> None:
    draft = draft_of(Ngram(), [1, 2, 3, 8, 7, 1, 2, 3], 3)
    assert draft.sources == ("ngram",) * 3
    assert draft.parents is None
    assert len(draft.scores) == 3
    assert all(0 < a < b < 1 for a, b in zip(draft.scores, draft.scores[1:], strict=False))


def test_sizes_must_be_usable() -> None:
    for sizes in ((), (0,), (3, -1)):
        with pytest.raises(UsageError, match="sizes"):
            Ngram(sizes)


def test_sequences_are_kept_apart_and_forgotten() -> None:
    drafter = Ngram()
    one, other = Seq("one", [1, 2, 3, 1, 2], 5), Seq("other", [7, 8, 1, 2], 4)
    drafter.begin(one)
    drafter.begin(other)
    first, second = drafter.draft([Ask(one, 1), Ask(other, 1)])
    assert first.tokens == (3,)
    assert not second
    drafter.end(one)
    drafter.end(other)
    drafter.end(other)
    assert not drafter._tokens


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 8), st.lists(st.integers(0, 3), max_size=3))
def test_against_a_plain_search(tokens: list[int], budget: int, after: list[int]) -> None:
    """Token by token, as it would come, or all at once."""
    drafter, grown = Ngram(), Seq("grown", [], 0)
    for token in tokens:
        grown.tokens.append(token)
        drafter.draft([Ask(grown, budget)])
    expected = searched(tokens, tuple(after), budget)
    assert drafter.draft([Ask(grown, budget, tuple(after))])[0].tokens == expected
    assert draft_of(Ngram(), tokens, budget, tuple(after)).tokens == expected


def searched(tokens: list[int], after: tuple[int, ...], budget: int) -> tuple[int, ...]:
    text = [*tokens, *after]
    for n in (4, 3, 2):
        for place in range(len(tokens) - 1, n - 1, -1):
            if len(text) >= n and text[place - n : place] == text[-n:]:
                copied = list(text)
                for i in range(budget):
                    copied.append(copied[place + i])
                return tuple(copied[len(text) :])
    return ()
