"""The double behaves as the protocol says, and tells on those who do not."""

import numpy as np
import pytest

from paceline.testing import ToyCursor
from paceline.types import Cursor
from support.grammars import sentence


def test_a_refused_token_moves_nothing() -> None:
    cursor = sentence({1, 2}, {3})
    assert not cursor.advance(3)
    assert cursor.advance(2)
    assert cursor.tokens == (2,)


def test_the_row_is_the_mask_whatever_was_in_it() -> None:
    row = np.full(3, 0xFFFFFFFF, np.uint32)
    assert sentence({0, 31, 32, 65}).fill(row)
    assert row.tolist() == [1 | 1 << 31, 1, 2]


def test_where_anything_may_come_the_row_is_not_written() -> None:
    cursor, row = ToyCursor(lambda _: None), np.array([7], np.uint32)
    assert not cursor.fill(row)
    assert row.tolist() == [7]
    assert cursor.advance(99)
    assert not cursor.finished
    assert cursor.forced() == []


def test_forced_tokens_are_those_without_an_alternative() -> None:
    cursor: Cursor = sentence({1}, {2}, {3, 4}, {5})
    assert cursor.forced() == [1, 2]
    assert sentence({1}, {9}, {2}, eos=9).forced() == [1, 9]


def test_forks_go_their_own_ways_and_count_together() -> None:
    cursor = sentence({1, 2}, {3}, {4})
    fork = cursor.fork()
    assert fork.advance(1)
    assert cursor.tokens == ()
    fork.fill(np.zeros(1, np.uint32))
    assert cursor.filled == [(1,)]


def test_a_cursor_cannot_be_used_after_the_end() -> None:
    for ended in (sentence(), sentence({9}, {1}, eos=9)):
        if not ended.finished:
            assert ended.advance(9)
        assert ended.finished
        with pytest.raises(AssertionError, match="after the end"):
            ended.advance(1)
        with pytest.raises(AssertionError, match="after the end"):
            ended.fill(np.zeros(1, np.uint32))
