"""suffix.cpp against ContextIndex and the vote in Python: the same index, the same drafts, bit for bit."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.suffix import index, native
from paceline.drafters.suffix.index import ContextIndex, SuffixIndex
from paceline.drafters.suffix.native import NativeIndex, new_index, restored_index
from paceline.drafters.suffix.vote import SEPARATOR
from paceline.testing import ToyCursor
from support.agent_text import CODE, PROSE
from support.grammars import VOCAB, random_rules

DEPTH = 4
token_lists = st.lists(st.integers(0, 3), max_size=30)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), token_lists),
        st.tuples(st.just("extend"), token_lists),
        st.tuples(st.just("evict"), st.just([])),
    ),
    max_size=12,
)
afters = st.lists(st.integers(0, 3), max_size=6)
Script = list[tuple[str, list[int]]]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK", 4)
    monkeypatch.setattr(index, "SLACK", 8)


def native_index(depth: int = DEPTH) -> NativeIndex:
    made = new_index(depth)
    assert isinstance(made, NativeIndex), "no compiler"
    return made


def play(script: Script, *indexes: SuffixIndex) -> None:
    for step, tokens in script:
        for one in indexes:
            if step == "open":
                one.open(tokens)
            elif step == "extend" and one.documents:
                one.extend(tokens)
            elif step == "evict" and one.documents:
                one.evict()


def pair(script: Script) -> tuple[ContextIndex, NativeIndex]:
    both = ContextIndex(DEPTH), native_index()
    play(script, *both)
    return both


def parts(one: SuffixIndex) -> list[list[int]]:
    return [part.tolist() for part in one.snapshot()]


@given(steps)
def test_both_hold_the_same_after_any_changes(script: Script) -> None:
    python, cpp = pair(script)
    assert (len(cpp), cpp.documents, cpp.held) == (len(python), python.documents, python.held)
    assert parts(cpp) == parts(python)


@given(
    steps, steps, token_lists, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 9), st.integers(1, 3)
)
def test_both_draft_the_same(
    own: Script, past: Script, new: list[int], after: list[int], budget: int, width: int
) -> None:
    (python, cpp), (python_past, cpp_past) = pair([("open", []), *own]), pair(past)
    for one in (python, cpp):
        one.open(after)
    for min_chance in (0.0, 0.1):
        expected = python.draft(new, python_past, after, budget, width, min_chance)
        assert cpp.draft(new, cpp_past, after, budget, width, min_chance) == expected
    assert cpp.draft((), None, (), budget, width, 0.0) == python.draft((), None, (), budget, width, 0.0)
    assert parts(cpp) == parts(python)


@pytest.mark.parametrize("seed", range(8))
def test_both_draft_the_same_under_a_grammar(seed: int) -> None:
    rng = random.Random(seed)
    python, cpp = ContextIndex(), native_index(32)
    text = rng.choices(range(VOCAB), k=300)
    cursor = ToyCursor(random_rules(seed))
    for one in (python, cpp):
        one.open()
        one.extend(text)
    for _ in range(20):
        new = rng.choices(range(VOCAB), k=3)
        expected = python.draft(new, None, (), 6, 2, 0.05, cursor)
        assert cpp.draft(new, None, (), 6, 2, 0.05, cursor) == expected


def test_both_draft_the_same_on_agent_text() -> None:
    python, cpp, past = ContextIndex(), native_index(32), (ContextIndex(), native_index(32))
    tokens = list(f"{CODE}{PROSE}{CODE}{PROSE[::-1]}{CODE}{PROSE}".encode())
    for one in past:
        one.open()
        one.extend(tokens[: len(tokens) // 2])
    drafted = 0
    for one in (python, cpp):
        one.open()
    for at in range(len(tokens) // 2, len(tokens), 3):
        expected = python.draft(tokens[at : at + 3], past[0], (), 7, 1, 0.1)
        assert cpp.draft(tokens[at : at + 3], past[1], (), 7, 1, 0.1) == expected
        drafted += expected is not None
    assert drafted > 100


@given(steps, token_lists)
def test_a_snapshot_of_either_is_restored_by_the_other(script: Script, more: list[int]) -> None:
    python, cpp = pair(script)
    crossed = restored_index(DEPTH, python.snapshot()), ContextIndex.restore(DEPTH, cpp.snapshot())
    for one in (python, *crossed):
        one.open()
        one.extend(more)
    assert parts(crossed[0]) == parts(crossed[1]) == parts(python)


def test_parts_that_do_not_fit_are_refused() -> None:
    _, cpp = pair([("open", []), ("extend", [1, 2, 3, 1, 2]), ("open", []), ("extend", [3, 2, 1])])
    log, positions, spans = cpp.snapshot()
    for damaged in ((log[:-1], positions, spans), (log, positions[::-1], spans), (log, positions, spans + 9)):
        with pytest.raises(ValueError):
            restored_index(DEPTH, damaged)


def test_a_long_budget_gets_room() -> None:
    cpp = native_index()
    cpp.open()
    nodes = cpp.draft([1, 2, 3, 4] * 20 + [1, 2, 3, 4], None, (), 50, 1, 0.0)
    assert nodes is not None
    assert len(nodes[0]) <= 50
    assert SEPARATOR not in nodes[0]


def test_python_takes_over_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_COMPILER", "none")
    native._library.cache_clear()
    try:
        assert isinstance(new_index(DEPTH), ContextIndex)
    finally:
        native._library.cache_clear()
