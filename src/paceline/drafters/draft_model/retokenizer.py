"""Incremental retokenization: the target's text in another model's tokens, as it grows."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from paceline.types import common_prefix

if TYPE_CHECKING:
    from paceline.drafters.draft_model.vocab_mapping import TokenizerPair

REWRITE_BYTES: Final = 64  # bytes before the new text that may be encoded again


class IncrementalRetokenizer:
    """One sequence. Only a short tail is encoded again; the tokens before it keep their rows in a cache."""

    def __init__(self, pair: "TokenizerPair") -> None:
        self._pair = pair
        self._source: list[int] = []  # the target's tokens
        self._starts: list[int] = []  # the byte where each of them begins
        self._text = bytearray()
        self._walls = [0]  # bytes right after special tokens, which no token crosses
        self._ids = list(pair.bos)  # the draft model's tokens
        self._ends = [0] * len(pair.bos)  # the byte where each of them ends

    def update(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's tokens for this text of the target."""
        source = list(tokens)
        same = common_prefix(self._source, source)
        if same < len(self._source) or same < len(source):
            self._truncate(same)
            self._drop_unstable()
            for token in source[same:]:
                self._append(token)
            self._encode_rest()
        return list(self._ids)

    def _truncate(self, same: int) -> None:
        """Drops the target's tokens from here on."""
        if same < len(self._source):
            del self._text[self._starts[same] :]
            del self._source[same:], self._starts[same:]
            while self._walls[-1] > len(self._text):
                self._walls.pop()

    def _drop_unstable(self) -> None:
        """Drops the tokens that later text may change."""
        stable = bisect_right(self._ends, self._stable_end())
        del self._ids[stable:], self._ends[stable:]

    def _append(self, token: int) -> None:
        special = self._pair.specials.get(token)
        if special is not None:
            self._encode_rest()
        self._source.append(token)
        self._starts.append(len(self._text))
        self._text += self._pair.piece(token)
        if special is not None:
            end = len(self._text)
            self._ids += special
            self._ends += [end] * len(special)
            self._walls.append(end)

    def _encode_rest(self) -> None:
        """Encodes the text that has no tokens yet."""
        encoded = max(self._walls[-1], self._ends[-1] if self._ends else 0)
        if encoded < len(self._text):
            ids, ends = self._pair.draft_encoder.encode_with_ends(bytes(self._text[encoded:]))
            self._ids += ids
            self._ends += [encoded + end for end in ends]

    def _stable_end(self) -> int:
        """The last byte where tokens end whatever follows the text: mostly before the last word.

        Where no word ends within reach, some position where a token ends.
        """
        end, wall = len(self._text), self._walls[-1]
        low = max(wall, end - REWRITE_BYTES)
        at = self._text.rfind(b" ", low, end)
        while at > low:
            if self._ends_word(at):
                return at
            at = self._text.rfind(b" ", low, at)
        ends = (e for e in self._ends[bisect_left(self._ends, low) :] if not self._inside_char(e))
        return wall if low == wall else next(ends, wall)

    def _ends_word(self, at: int) -> bool:
        """True if a word and a token end before the space at this byte."""
        before = self._text[max(0, at - 4) : at].decode(errors="ignore")[-1:]
        i = bisect_left(self._ends, at)
        return not before.isspace() and i < len(self._ends) and self._ends[i] == at

    def _inside_char(self, at: int) -> bool:
        return at < len(self._text) and self._text[at] & 0xC0 == 0x80
