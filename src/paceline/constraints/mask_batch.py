"""Masks of many outputs along their drafts, in native calls that do not hold Python's lock.

A call for each mask gives up the lock and waits for it again, which takes longer than the mask.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paceline.constraints.draft_masks import UNREACHABLE, Masks, words
from paceline.types import Bits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_THREADS: Final = 8
SLOW_S: Final = 0.003  # of a call, and for each of its masks:
SLOW_MASK_S: Final = 0.0001


@dataclass(frozen=True, slots=True)
class MatcherCopy:
    """Of a cursor, for one call: others may use the cursor meanwhile."""

    matcher: "LLMatcher"
    ends: frozenset[int]  # tokens that end the output
    vocab: int
    slow: Callable[[float], None]  # called with the seconds that its masks took, where they were slow
    failed: Callable[[], None]  # called after an error

    def takes(self, tokens: Sequence[int], width: int) -> bool:
        """width: words in a row; llguidance takes only as many as the vocabulary needs."""
        return width == words(self.vocab) and all(
            token < self.vocab and token not in self.ends for token in tokens
        )


Asked = tuple[MatcherCopy, Sequence[int]]  # and a chain of tokens


def fill_batch(asked: Sequence[Asked], width: int) -> list[Masks | None]:
    """The masks along chains of tokens, as `draft_masks.masks`. width: words in a row.

    None: the cursor has to be asked, which knows of ends, dead ends and errors.
    """
    able = [(copy, tokens) for copy, tokens in asked if copy.takes(tokens, width)]
    firsts = list(accumulate((1 + len(tokens) for _, tokens in able), initial=0))
    rows: Bits = np.zeros((firsts[-1], width), np.uint32)
    started = perf_counter()
    _compute(able, firsts, rows)
    seconds = perf_counter() - started
    if seconds > SLOW_S + SLOW_MASK_S * len(rows):
        for copy, _ in able:
            copy.slow(seconds / len(able))
    goes_on = _allow_more_than(frozenset[int]().union(*(copy.ends for copy, _ in able)), rows)
    allowed = _allowed([token for _, tokens in able for token in (*tokens, 0)], rows)
    found = (
        _masks(copy, len(tokens), rows[first:], goes_on[first:], allowed[first:])
        for (copy, tokens), first in zip(able, firsts, strict=False)
    )
    return [next(found) if copy.takes(tokens, width) else None for copy, tokens in asked]


def _compute(asked: Sequence[Asked], firsts: Sequence[int], rows: Bits) -> None:
    """The rows after a token that is not allowed stay 0."""
    alone, chains = list[Any](), list[Any]()
    for (copy, tokens), first in zip(asked, firsts, strict=False):
        if tokens:
            chains.append((copy.matcher, first, list(tokens)))
        else:
            alone.append((copy.matcher, first))
    if alone:
        _executor().unsafe_compute_mask_ptr(alone, rows.ctypes.data, rows.strides[0], len(rows))
    if chains:
        _executor().unsafe_compute_mask_ptr_with_draft_token(
            chains, rows.ctypes.data, rows.strides[0], len(rows)
        )


def _masks(
    copy: MatcherCopy, tokens: int, rows: Bits, goes_on: Sequence[bool], allowed: Sequence[bool]
) -> Masks | None:
    """Of one chain, which begins with the first row. allowed: the token that comes after each row."""
    if copy.matcher.is_error():
        copy.failed()
        return None
    known = 1
    while known <= tokens and allowed[known - 1]:
        known += 1
    if not all(goes_on[:known]):
        return None
    return Masks([*rows[:known], *[UNREACHABLE] * (1 + tokens - known)])


def _allow_more_than(ends: frozenset[int], rows: Bits) -> list[bool]:
    """For each row: whether a token other than these may follow."""
    at = np.array(sorted({end // 32 for end in ends if end // 32 < rows.shape[1]}), np.intp)
    keep = np.full(len(at), 0xFFFFFFFF, np.uint32)
    for place, word in enumerate(at):
        keep[place] &= ~np.uint32(sum(1 << end % 32 for end in ends if end // 32 == word))
    held = rows[:, at]
    rows[:, at] = held & keep
    more: list[bool] = (rows.max(axis=1) > 0).tolist()
    rows[:, at] = held
    return more


def _allowed(tokens: Sequence[int], rows: Bits) -> list[bool]:
    at = np.array(tokens, np.int64)
    of_rows = rows[np.arange(len(rows)), at // 32]
    found: list[bool] = (of_rows >> (at % 32).astype(np.uint32) & np.uint32(1)).astype(bool).tolist()
    return found


@cache
def _executor() -> "LLExecutor":
    """Where the cores are few they belong to the passes."""
    from llguidance import LLExecutor

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LLExecutor(max(1, min(cores // 2, MAX_THREADS)))
