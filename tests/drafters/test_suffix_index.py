"""ContextIndex against a search through plain lists."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.suffix import index
from paceline.drafters.suffix.index import ContextIndex, Snapshot

DEPTH = 4
EVERYTHING = 10_000
Tokens = list[int]
Script = list[tuple[str, Tokens]]

token_lists = st.lists(st.integers(0, 3), max_size=40)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), token_lists),
        st.tuples(st.just("extend"), token_lists),
        st.tuples(st.just("evict"), st.just([])),
    ),
    max_size=12,
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK", 4)
    monkeypatch.setattr(index, "SLACK", 8)


@dataclass
class Plain:
    """The same documents, searched by looking everywhere."""

    documents: list[tuple[Tokens, Tokens]] = field(default_factory=list)  # context, tokens

    def apply(self, step: str, tokens: Tokens) -> None:
        if step == "open":
            self.documents.append((tokens[-DEPTH:], []))
        elif step == "extend" and self.documents:
            self.documents[-1][1].extend(tokens)
        elif step == "evict" and self.documents:
            del self.documents[0]

    def matches(self, context: Tokens) -> Iterator[tuple[int, int, int]]:
        """(tokens in common, document, what followed) of every place that has any in common."""
        for number, (before, tokens) in enumerate(self.documents):
            text = before + tokens
            for place in range(max(0, len(before) - 1), len(text) - 1):
                length = common(text[: place + 1], context)
                if length:
                    yield length, number, text[place + 1]


def common(a: Tokens, b: Tokens) -> int:
    length = 0
    while length < min(len(a), len(b), DEPTH) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def build(script: Script) -> tuple[ContextIndex, Plain]:
    index, plain = ContextIndex(DEPTH), Plain()
    for step, tokens in script:
        if step == "open":
            index.open(tokens)
        elif step == "extend" and plain.documents:
            index.extend(tokens)
        elif step == "evict" and plain.documents:
            index.evict()
        plain.apply(step, tokens)
    return index, plain


def found(index: ContextIndex, context: Tokens, limit: int = EVERYTHING) -> list[tuple[int, int]]:
    """(tokens in common, what followed), longest first, then latest first."""
    return [
        (length, log[place]) for length, _, place, log in sorted(index.nearest(context, limit), reverse=True)
    ]


@given(steps, token_lists)
def test_every_match_is_found_with_its_length(script: Script, context: Tokens) -> None:
    index, plain = build(script)
    expected = sorted((length, token) for length, _, token in plain.matches(context))
    assert sorted(found(index, context)) == expected


@given(steps, token_lists, st.integers(1, 3))
def test_a_small_window_still_finds_the_longest(script: Script, context: Tokens, limit: int) -> None:
    index, plain = build(script)
    lengths = sorted((length for length, _, _ in plain.matches(context)), reverse=True)
    few = [length for length, _ in found(index, context, limit)]
    assert len(few) <= 2 * limit
    assert few[:limit] == lengths[:limit]


@given(steps, token_lists)
def test_of_equals_the_latest_comes_first(script: Script, context: Tokens) -> None:
    index, plain = build(script)
    latest = list(plain.matches(context))[::-1]  # they come in the order they were written
    latest.sort(key=lambda match: match[0], reverse=True)
    assert found(index, context) == [(length, token) for length, _, token in latest]


@given(st.lists(token_lists, max_size=8))
def test_piece_by_piece_is_the_same_as_at_once(pieces: list[Tokens]) -> None:
    slowly, at_once = ContextIndex(DEPTH), ContextIndex(DEPTH)
    slowly.open()
    at_once.open()
    for piece in pieces:
        for token in piece:
            slowly.extend([token])
    at_once.extend([token for piece in pieces for token in piece])
    assert same(slowly.snapshot(), at_once.snapshot())


@given(steps)
def test_it_counts_what_it_holds(script: Script) -> None:
    index, plain = build(script)
    assert index.documents == len(plain.documents)
    indexed = [max(0, len(tokens) + bool(before) - 1) for before, tokens in plain.documents]
    assert len(index) == sum(indexed)


@given(steps, token_lists, token_lists)
def test_a_snapshot_is_the_whole_of_it(script: Script, more: Tokens, context: Tokens) -> None:
    index, _ = build(script)
    restored = ContextIndex.restore(DEPTH, index.snapshot())
    for one in (index, restored):
        one.open()
        one.extend(more)
        one.evict()
    assert found(restored, context) == found(index, context)
    assert same(restored.snapshot(), index.snapshot())


def test_the_log_does_not_grow_for_ever() -> None:
    index = ContextIndex(DEPTH)
    for i in range(200):
        index.open()
        index.extend([i, i + 1, i + 2, i + 3, i + 4])
        if i >= 3:
            index.evict()
    assert index.documents == 3
    assert len(index.log) < 60
    assert len(index._blocks) < 20


def test_the_end_of_a_text_does_not_find_itself() -> None:
    index = ContextIndex(DEPTH)
    index.open()
    index.extend([1, 2, 3])
    assert found(index, [1, 2, 3]) == []
    index.extend([4])
    assert found(index, [1, 2, 3]) == [(3, 4)]


def test_context_before_a_document_lengthens_matches() -> None:
    index = ContextIndex(DEPTH)
    index.open([5, 6, 7])
    index.extend([8, 9])
    assert found(index, [5, 6, 7]) == [(3, 8)]
    assert found(index, [5, 6]) == []  # not indexed itself


def test_matches_end_where_documents_do() -> None:
    index = ContextIndex(DEPTH)
    for document in ([1, 2], [2, 3]):
        index.open()
        index.extend(document)
    assert found(index, [1, 2]) == [(1, 3)]


def damaged(index: ContextIndex) -> Iterator[Snapshot]:
    log, places, spans = index.snapshot()
    yield log[:-1], places, spans
    yield log[:3], places[:0], spans[:0]
    yield log, places[:-1], spans
    yield log, places[::-1], spans
    yield log, places, spans + 100
    yield log, places, spans[::-1]


def test_parts_that_do_not_fit_are_refused() -> None:
    index = ContextIndex(DEPTH)
    for document in ([1, 2, 3, 1, 2], [3, 2, 1]):
        index.open()
        index.extend(document)
    for snapshot in damaged(index):
        with pytest.raises(ValueError):
            ContextIndex.restore(DEPTH, snapshot)


def same(a: Snapshot, b: Snapshot) -> bool:
    return [part.tolist() for part in a] == [part.tolist() for part in b]
