"""Lossless encoding: bytes to tokens whose bytes are exactly those bytes."""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # text needs more than torch and numpy
    from paceline.text import Tokenizer

_SPLIT: Final = re.compile(r"[\udc80-\udcff]|[^\udc80-\udcff]+")  # one byte that is not UTF-8; text
_ANCHOR: Final = "\n"  # put before a text where the tokenizer would add a space


class ExactEncoder:
    """Encodes byte by byte what the tokenizer's normaliser would change."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        text = (t for t in range(tokenizer.vocab_size) if t not in tokenizer.control)
        self._bytes = {piece[0]: token for token in text if len(piece := tokenizer.piece(token)) == 1}

    def encode_with_ends(self, text: bytes) -> tuple[list[int], list[int]]:
        """The text's tokens, and the byte where each ends; a byte without a token is left out."""
        ids: list[int] = []
        ends: list[int] = []
        at = 0
        for part in _SPLIT.findall(text.decode(errors="surrogateescape")):
            for piece, tokens in self._exact(part):
                end = at
                for token in tokens:
                    end += len(self._tokenizer.piece(token))
                    ids.append(token)
                    ends.append(end)
                at += len(piece)
        return ids, ends

    def encode(self, text: bytes) -> list[int]:
        return self.encode_with_ends(text)[0]

    def _exact(self, text: str) -> Iterator[tuple[bytes, list[int]]]:
        """Parts of the text, mostly one, and their tokens."""
        data = text.encode(errors="surrogateescape")
        if not "\udc80" <= text <= "\udcff":
            ids = self._encode(text)
            if b"".join(map(self._tokenizer.piece, ids)) == data:
                yield data, ids
                return
        if len(text) > 1:
            cut = _middle(text)
            yield from self._exact(text[:cut])
            yield from self._exact(text[cut:])
        else:
            yield from ((data[i : i + 1], self._byte(data[i])) for i in range(len(data)))

    def _encode(self, text: str) -> list[int]:
        if not self._tokenizer.strips_first_space:
            return self._tokenizer.encode(text, special=False)
        ids = self._tokenizer.encode(_ANCHOR + text, special=False)
        ends = accumulate(len(self._tokenizer.piece(token)) for token in ids)
        return [token for token, end in zip(ids, ends, strict=True) if end > len(_ANCHOR) + 1]

    def _byte(self, byte: int) -> list[int]:
        return [self._bytes[byte]] if byte in self._bytes else []


def _middle(text: str) -> int:
    """The position that splits a text in two: before a word if there are several."""
    half = len(text) // 2
    return max(text.rfind(" ", 1, half + 1), 0) or max(text.find(" ", half), 0) or half


def without_partial_char(text: bytes) -> bytes:
    """Without the first bytes of a UTF-8 character that is not complete yet."""
    for back, byte in enumerate(reversed(text[-3:]), 1):
        if byte & 0xC0 != 0x80:  # the first byte of a character
            length = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return text[:-back] if length > back else text
    return text
