"""Checks a text against a constraint, with the engine that enforces it."""

from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from paceline.constraints.compiler import byte_matcher
from paceline.constraints.grammars import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CACHED: Final = 256  # compiled constraints


def fits(constraint: Constraint, text: str) -> bool:
    raw = as_bytes(text)
    return any(True for _ in ends(constraint, raw, 0, [len(raw)]))


def ends(constraint: Constraint, text: bytes, start: int, positions: Iterable[int]) -> Iterator[int]:
    """The positions, of ascending ones, up to which the text from `start` on fits the constraint."""
    assert isinstance(constraint, Hashable), "constraints are keys of caches"
    matcher = _pristine(constraint).deep_copy()
    at = start
    for position in positions:
        if matcher.try_consume_tokens(list(text[at:position])) != position - at:
            if matcher.is_error():  # later copies would be broken too
                _pristine.cache_clear()
            return
        at = position
        if matcher.is_accepting():
            yield position


def as_bytes(text: str) -> bytes:
    """Lone surrogates become bytes that fit nothing."""
    return text.encode("utf-8", "surrogatepass")


@lru_cache(MAX_CACHED)
def _pristine(constraint: Constraint) -> "LLMatcher":
    return byte_matcher(constraint)
