"""The records that all modules share."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ShuttingDown
from paceline.testing import ToyCursor
from paceline.types import Ask, Draft, Round, Seq, common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(TOKENS, TOKENS, TOKENS)
def test_the_common_prefix_is_as_long_as_counting_says(shared: list[int], a: list[int], b: list[int]) -> None:
    one, two = [*shared, *a], [*shared, *b]
    counted = next(
        (i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two))
    )
    assert common_prefix(one, two) == common_prefix(tuple(one), two) == counted


SEQ = Seq("s", [1], 1, cached=3)
DRAFT = Draft((1,), rejected_sources=("ngram",))


@pytest.mark.parametrize(
    ("record", "old", "value"),
    [
        (SEQ, "shared", 3),
        (Ask(SEQ, 4, forced_budget=2), "certain", 2),
        (DRAFT, "refused", ("ngram",)),
        (Round("s", 1, (), DRAFT, (), (), 0, 1, 1, 0, 0, drafted=5), "guessed", 5),
    ],
)
def test_old_names_of_fields_can_still_be_read(record: object, old: str, value: object) -> None:
    with pytest.warns(DeprecationWarning, match=old):
        assert getattr(record, old) == value


def test_the_old_name_of_canonical_tokens_works() -> None:
    cursor = ToyCursor(lambda _: None, canonical=lambda _: (1, 2))
    with pytest.warns(DeprecationWarning, match="canonical"):
        assert cursor.spelled() == cursor.canonical() == [1, 2]


def test_errors_without_arguments_survive_pickling() -> None:
    assert str(pickle.loads(pickle.dumps(ShuttingDown()))) == str(ShuttingDown())
