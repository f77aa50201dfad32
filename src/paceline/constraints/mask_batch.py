"""Masks of many outputs along their drafts, in native calls that do not hold Python's lock.

A call for each mask gives up the lock and waits for it again, which takes longer than the mask.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

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

    def takes(self, tokens: Sequence[int]) -> bool:
        return all(token < self.vocab and token not in self.ends for token in tokens)


Asked = tuple[MatcherCopy, Sequence[int]]  # and a chain of tokens


def fill_batch(asked: Sequence[Asked], width: int) -> list[Masks | None]:
    """The masks along chains of tokens, as `draft_masks.masks`. width: words in a row.

    None: the cursor has to be asked, which knows of ends, dead ends and errors.
    """
    able = [one for one in asked if not one[1] or one[0].takes(one[1])]
    if any(words(copy.vocab) != width for copy, _ in able[:1]):
        raise ValueError(f"a vocabulary of {able[0][0].vocab} tokens has no masks of {width} words")
    rows, firsts = _computed(able, width)
    goes_on = _allow_more_than(frozenset[int]().union(*{copy.ends for copy, _ in able}), rows)
    results: list[Masks | None] = []
    chained = len(rows) > len(able)
    allowed = _allowed([t for _, tokens in able for t in (*tokens, 0)], rows) if chained else ()
    for (copy, tokens), first in zip(able, firsts, strict=True):
        if copy.matcher.is_error():
            copy.failed()
            results.append(None)
        else:
            results.append(_masks(len(tokens), first, rows, goes_on, allowed))
    if len(able) == len(asked):
        return results
    found = iter(results)
    return [next(found) if not tokens or copy.takes(tokens) else None for copy, tokens in asked]


def _computed(asked: Sequence[Asked], width: int) -> tuple[Bits, list[int]]:
    """The rows, and the first of each chain. Those after a token that is not allowed stay 0."""
    firsts, alone, chains, first = list[int](), list[Any](), list[Any](), 0
    for copy, tokens in asked:
        if tokens:
            chains.append((copy.matcher, first, list(tokens)))
        else:
            alone.append((copy.matcher, first))
        firsts.append(first)
        first += 1 + len(tokens)
    rows: Bits = np.zeros((first, width), np.uint32)
    at, size, started = rows.ctypes.data, 4 * width, perf_counter()
    if alone:
        _executor().unsafe_compute_mask_ptr(alone, at, size, first)
    if chains:
        _executor().unsafe_compute_mask_ptr_with_draft_token(chains, at, size, first)
    seconds = perf_counter() - started
    if seconds > SLOW_S + SLOW_MASK_S * first:
        for copy, _ in asked:
            copy.slow(seconds / len(asked))
    return rows, firsts


def _masks(
    tokens: int, first: int, rows: Bits, goes_on: Sequence[bool], allowed: Sequence[bool]
) -> Masks | None:
    """Of one chain. allowed: the token that comes after each row."""
    if not tokens:
        return Masks((rows[first],)) if goes_on[first] else None
    end, last = first + 1, first + 1 + tokens
    while end < last and allowed[end - 1]:
        end += 1
    if not all(goes_on[first:end]):
        return None
    return Masks([*rows[first:end], *[UNREACHABLE] * (last - end)])


def _allow_more_than(ends: frozenset[int], rows: Bits) -> list[bool]:
    """For each row: whether a token other than these may follow."""
    at, keep = _ends(ends)
    held = rows[:, at]
    rows[:, at] = held & keep
    more: list[bool] = (rows.max(axis=1) > 0).tolist()
    rows[:, at] = held
    return more


@lru_cache(maxsize=16)
def _ends(ends: frozenset[int]) -> tuple[NDArray[np.intp], Bits]:
    """The words that have these bits, and the words without them."""
    at = sorted({end // 32 for end in ends})
    of_word = [sum(1 << end % 32 for end in ends if end // 32 == word) for word in at]
    return np.array(at, np.intp), np.array([0xFFFFFFFF & ~bits for bits in of_word], np.uint32)


def _allowed(tokens: Sequence[int], rows: Bits) -> list[bool]:
    """For each row: whether it allows the token."""
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
