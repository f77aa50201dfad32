"""From feeds to the rows of passes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline.target.cuda.arguments import KEY_CHUNK, MAX_ROWS
from paceline.target.cuda.batch import (
    PassRows,
    SpareSlots,
    chain_pass,
    feed_rows,
    pass_groups,
    passes,
)
from paceline.types import Draft, Sampler

SAMPLER = Sampler(0.0, 7, 0, 3)


@given(
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(0, 3 * KEY_CHUNK),
    st.sampled_from([None, SAMPLER, replace(SAMPLER, repetition=1.2)]),
    st.booleans(),
)
def test_a_chain_alone_makes_the_rows_that_any_feed_makes(
    fed: int, drafted: int, start: int, sampler: Sampler | None, scored: bool
) -> None:
    draft, count = Draft(tuple(range(drafted))), fed + drafted
    feed = feed_rows(
        "s",
        list(range(50, 50 + fed)),
        draft,
        start,
        lambda first, end: list(range(1000 + first, 1000 + end)),
        SpareSlots(0, 0),
        fed - 1 if scored else count,
        sampler,
    )
    expected = PassRows()
    expected.add(feed, 0, count)
    assert chain_pass(feed, 8192) == expected


def test_what_is_no_chain_or_needs_two_passes_is_left_to_the_others() -> None:
    def feed(draft: Draft) -> PassRows | None:
        rows = feed_rows("s", [1], draft, 0, lambda a, b: list(range(a, b)), SpareSlots(500, 9), 0)
        return chain_pass(rows, 70)

    assert feed(Draft((1, 2))) is not None
    assert feed(Draft((1, 2), (-1, -1))) is None
    assert feed(Draft(tuple(range(MAX_ROWS)))) is None


def test_a_draft_with_masks_is_chosen_in_one_group() -> None:
    """A cut one would have its logits copied to the host; others are cut, and fill every group."""

    def groups(sampler: Sampler, count: int, drafted: int) -> list[PassRows]:
        feeds = [
            feed_rows(f"{i}", [1], Draft(tuple(range(drafted))), 0, _slots, SpareSlots(0, 0), 0, sampler)
            for i in range(count)
        ]
        return list(passes(feeds, 8192))

    masked = groups(replace(SAMPLER, masks=lambda: [None]), 16, 6)
    assert [len(rows.tokens) for rows in masked] == [63, 49]
    assert all(rows.all_chosen for rows in masked)
    assert [len(rows.tokens) for rows in groups(SAMPLER, 16, 6)] == [MAX_ROWS, 112 - MAX_ROWS]
    prompt = feed_rows(
        "p", [1] * 90, Draft(()), 0, _slots, SpareSlots(0, 0), 89, replace(SAMPLER, masks=list)
    )
    short = feed_rows("s", [1] * 40, Draft(()), 0, _slots, SpareSlots(0, 0), 39, replace(SAMPLER, masks=list))
    assert [len(rows.tokens) for rows in passes([prompt, short], 8192)] == [64, 64, 2]
    long = groups(replace(SAMPLER, masks=lambda: [None]), 1, MAX_ROWS)
    assert [len(rows.tokens) for rows in long] == [MAX_ROWS, 1]


def _slots(first: int, end: int) -> list[int]:
    return list(range(first, end))


def test_groups_of_rows_grow_with_the_batch() -> None:
    assert [pass_groups(batch) for batch in (1, 16, 17, 32, 48, 64, 256)] == [1, 1, 2, 2, 3, 4, 4]
