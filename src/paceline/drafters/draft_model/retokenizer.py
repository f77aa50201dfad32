"""The target's text told in another model's tokens; as it grows, only a short tail is told anew."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.drafters.draft_model.vocab_mapping import Dictionary

REACH: Final = 64  # bytes before the new text that may be told anew


class Transcript:
    """One sequence. Tokens that both texts begin with keep their telling, and so their rows in a cache."""

    def __init__(self, words: "Dictionary") -> None:
        self._words = words
        self._said: list[int] = []  # the target's tokens
        self._starts: list[int] = []  # the byte where each of them begins
        self._text = bytearray()
        self._walls = [0]  # bytes right after marks, which no token crosses
        first = words.first
        self._ids = list(first)
        self._ends = [0] * len(first)  # the byte where each of the ids ends

    def tell(self, tokens: Sequence[int]) -> list[int]:
        """The tokens to read for this text of the target's."""
        same = common(self._said, tokens)
        if same < len(self._said) or same < len(tokens):
            self._forget(same)
            self._rewind()
            for token in tokens[same:]:
                self._hear(token)
            self._spell()
        return list(self._ids)

    def _forget(self, same: int) -> None:
        """The target's tokens from here on were not said."""
        if same < len(self._said):
            del self._text[self._starts[same] :]
            del self._said[same:], self._starts[same:]
            while self._walls[-1] > len(self._text):
                self._walls.pop()

    def _rewind(self) -> None:
        """Drops the tokens that text to come may change."""
        kept = bisect_right(self._ends, self._steady())
        del self._ids[kept:], self._ends[kept:]

    def _hear(self, token: int) -> None:
        mark = self._words.marks.get(token)
        if mark is not None:
            self._spell()
        self._said.append(token)
        self._starts.append(len(self._text))
        self._text += self._words.piece(token)
        if mark is not None:
            end = len(self._text)
            self._ids += mark
            self._ends += [end] * len(mark)
            self._walls.append(end)

    def _spell(self) -> None:
        """Tells what has no tokens yet."""
        told = max(self._walls[-1], self._ends[-1] if self._ends else 0)
        if told < len(self._text):
            ids, ends = self._words.spelling.spell(bytes(self._text[told:]))
            self._ids += ids
            self._ends += [told + end for end in ends]

    def _steady(self) -> int:
        """The last byte where tokens end whatever follows the text: mostly before the last word.

        Where no word ends within reach, some place where a token ends.
        """
        end, wall = len(self._text), self._walls[-1]
        low = max(wall, end - REACH)
        at = self._text.rfind(b" ", low, end)
        while at > low:
            if self._ends_word(at):
                return at
            at = self._text.rfind(b" ", low, at)
        ends = (e for e in self._ends[bisect_left(self._ends, low) :] if not self._inside_letter(e))
        return wall if low == wall else next(ends, wall)

    def _ends_word(self, at: int) -> bool:
        """Whether a word and a token end before the space here."""
        before = self._text[max(0, at - 4) : at].decode(errors="ignore")[-1:]
        i = bisect_left(self._ends, at)
        return not before.isspace() and i < len(self._ends) and self._ends[i] == at

    def _inside_letter(self, at: int) -> bool:
        return at < len(self._text) and self._text[at] & 0xC0 == 0x80


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
