from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.prediction import NGRAMS, Prediction, PredictionIndex
from paceline.types import Ask, Draft, Seq

TEXT = tuple(range(10, 30))


def draft_of(
    output: list[int], budget: int = 3, after: tuple[int, ...] = (), text: tuple[int, ...] = TEXT
) -> Draft:
    seq = Seq("a", [1, 2, *output], 2, prediction=text)
    return Prediction().draft([Ask(seq, budget, after)])[0]


def test_it_starts_at_the_start() -> None:
    draft = draft_of([])
    assert draft.tokens == (10, 11, 12)
    assert draft.sources == ("prediction",) * 3
    assert all(0 < chance < 1 for chance in draft.scores)
    assert len(draft.scores) == 3


def test_it_follows_the_output() -> None:
    assert draft_of([10, 11]).tokens == (12, 13, 14)


def test_it_ends_with_the_prediction() -> None:
    assert draft_of(list(TEXT[:-2]), 5).tokens == TEXT[-2:]
    assert not draft_of(list(TEXT))


def test_it_is_silent_while_lost() -> None:
    assert not draft_of([10, 11, 99])
    assert not draft_of([10, 11, 99, 12])  # one token may be chance


def test_it_realigns_after_an_insertion() -> None:
    assert draft_of([10, 11, 99, 98, 12, 13]).tokens == (14, 15, 16)


def test_it_realigns_after_a_deletion() -> None:
    assert draft_of([10, 11, 16, 17]).tokens == (18, 19, 20)


def test_it_realigns_after_a_replacement() -> None:
    assert draft_of([10, 11, 99, 13, 14]).tokens == (15, 16, 17)


def test_the_nearest_position_ahead_is_taken() -> None:
    text = (1, 2, 50, 3, 4, 5, 1, 2, 60, 6, 1, 2, 70)
    assert draft_of([1, 2, 50, 3, 4, 99, 1, 2], 1, text=text).tokens == (60,)


def test_else_the_last_position_behind() -> None:
    text = (1, 2, 50, 1, 2, 60, 3, 4, 5)
    assert draft_of([*text, 99, 1, 2], 1, text=text).tokens == (60,)


def test_longer_runs_decide() -> None:
    text = (7, 1, 2, 50, 8, 1, 2, 60)
    assert draft_of([99, 8, 1, 2], 1, text=text).tokens == (60,)


def test_drafts_of_others_are_followed_and_forgotten() -> None:
    drafter, seq = Prediction(), Seq("a", [1, 10], 1, prediction=TEXT)
    assert drafter.draft([Ask(seq, 2, after=(11, 12))])[0].tokens == (13, 14)
    assert not drafter.draft([Ask(seq, 2, after=(99,))])[0]
    assert drafter.draft([Ask(seq, 2)])[0].tokens == (11, 12)


def test_no_prediction_no_draft() -> None:
    assert not draft_of([], text=())
    assert not draft_of([10], budget=0)


def test_a_new_sequence_starts_anew() -> None:
    drafter = Prediction()
    for text in (TEXT, TEXT[::-1]):
        seq = Seq("same id", [1], 1, prediction=text)
        drafter.begin(seq)
        assert drafter.draft([Ask(seq, 2)])[0].tokens == text[:2]
        drafter.end(seq)
    drafter.end(seq)


@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), max_size=30), st.integers(1, 8))
def test_a_draft_is_a_piece_of_the_prediction(text: list[int], output: list[int], budget: int) -> None:
    guessed = draft_of(output, budget, text=tuple(text)).tokens
    pieces = {tuple(text[i : i + len(guessed)]) for i in range(len(text) + 1)}
    assert len(guessed) <= budget
    assert guessed in pieces


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), min_size=2, max_size=4),
    st.integers(0, 40),
)
def test_an_ngram_is_found_where_it_occurs_next(text: list[int], ngram: list[int], at: int) -> None:
    n = len(ngram)
    assert n in NGRAMS
    ends = [end for end in range(n, len(text) + 1) if text[end - n : end] == ngram]
    ahead = [end for end in ends if end >= at]
    expected = ahead[0] if ahead else ends[-1] if ends else None
    assert PredictionIndex(text).find(tuple(ngram), at) == expected


def test_choices_share_an_index_that_was_made_before() -> None:
    index, drafter = PredictionIndex(TEXT), Prediction()
    for name in "ab":
        seq = Seq(name, [1, 2], 2, prediction=index)
        drafter.begin(seq)
        assert drafter._alignments[name].text is index
        assert drafter.draft([Ask(seq, 2)])[0].tokens == (10, 11)


def test_an_index_is_small() -> None:
    index = PredictionIndex(range(8192))
    arrays = [array for pair in index._by_length.values() for array in pair]
    assert sum(array.nbytes for array in arrays) <= 16 * 8192 * len(NGRAMS)
