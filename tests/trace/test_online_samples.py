"""Samples of served texts: the positions of rejected drafts, and no sample lost on the way."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.trace.online import OnlineTrainingConfig, RefreshJob, TrainingSample, rejected_positions
from paceline.types import NO_DRAFT, Draft, Round


def a_round(start: int, draft: Draft, path: tuple[int, ...], tokens: tuple[int, ...]) -> Round:
    return Round("r", start, ("suffix", "block"), draft, path, tokens, 4, 1, 1, 0, 0)


def test_a_refused_draft_is_noted_where_it_began() -> None:
    both = Draft((5, 6, 7), sources=("suffix", "block", "block"))
    assert rejected_positions([a_round(10, both, (0,), (5, 9))]) == {"block": (9,)}
    assert rejected_positions([a_round(10, both, (), (4,))]) == {"suffix": (9,)}
    assert rejected_positions([a_round(10, both, (0,), (5, 9)), a_round(12, both, (0, 1), (5, 6, 1))]) == {
        "block": (9, 11)
    }


def test_accepted_or_unverified_tokens_are_not_noted() -> None:
    chain = Draft((5, 6), sources=("block", "block"))
    assert rejected_positions([a_round(10, chain, (0, 1), (5, 6, 7))]) == {}
    assert (
        rejected_positions([a_round(10, chain, (0,), (5,))]) == {}
    )  # the first drafted token ended the text
    assert rejected_positions([a_round(10, NO_DRAFT, (), (5,)), a_round(3, NO_DRAFT, (), ())]) == {}


def test_in_a_tree_all_drafters_of_the_position_are_rejected() -> None:
    tree = Draft((5, 6, 7, 8), (-1, -1, 0, 1), ("block", "suffix", "suffix", "block"))
    assert rejected_positions([a_round(10, tree, (1,), (6, 9))]) == {"block": (9,)}
    assert rejected_positions([a_round(10, tree, (), (9,))]) == {"block": (9,), "suffix": (9,)}
    assert rejected_positions([a_round(10, tree, (1, 3), (6, 8, 2))]) == {}


TEXTS = st.builds(
    TrainingSample,
    st.lists(st.integers(0, 2**31), min_size=1).map(tuple),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(["block", "eagle"]), st.lists(st.integers(0, 99)).map(tuple)),
    st.text(),
)


@given(st.lists(TEXTS, max_size=4).map(tuple))
def test_a_job_comes_through_as_it_was(texts: tuple[TrainingSample, ...]) -> None:
    job = RefreshJob("/models/a b", ("/x",), EngineConfig(threads=1), texts, OnlineTrainingConfig(steps=3))
    assert RefreshJob.decode(job.encode()) == job
