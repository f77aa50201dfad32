"""The records that all modules share."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.types import common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(TOKENS, TOKENS, TOKENS)
def test_the_common_prefix_is_as_long_as_counting_says(shared: list[int], a: list[int], b: list[int]) -> None:
    one, two = [*shared, *a], [*shared, *b]
    counted = next(
        (i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two))
    )
    assert common_prefix(one, two) == common_prefix(tuple(one), two) == counted
