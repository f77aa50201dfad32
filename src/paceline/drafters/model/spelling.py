"""Bytes to one tokenizer's tokens, such that the tokens' bytes are those bytes."""

import re
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # text needs more than torch and numpy
    from paceline.text import Tokenizer

_RUNS: Final = re.compile(r"[\udc80-\udcff]|[^\udc80-\udcff]+")  # one byte that is no text; text
_ANCHOR: Final = "\n"  # stands before a text whose tokenizer would put a space there


class Spelling:
    """A tokenizer that loses nothing: what its normaliser would change is spelled byte by byte."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        text = (t for t in range(tokenizer.vocab_size) if t not in tokenizer.control)
        self._bytes = {piece[0]: token for token in text if len(piece := tokenizer.piece(token)) == 1}

    def spell(self, text: bytes) -> list[int]:
        """The tokens of the text; a byte that the tokenizer cannot say is left out."""
        ids: list[int] = []
        for run in _RUNS.findall(text.decode(errors="surrogateescape")):
            broken = len(run) == 1 and "\udc80" <= run <= "\udcff"
            ids += self._in_bytes(bytes([ord(run) - 0xDC00])) if broken else self._exact(run)
        return ids

    def ends(self, ids: list[int]) -> list[int]:
        """How many bytes there are up to the end of each token."""
        return list(accumulate(len(self._tokenizer.piece(token)) for token in ids))

    def _exact(self, text: str) -> list[int]:
        ids = self._encode(text)
        if b"".join(map(self._tokenizer.piece, ids)) == text.encode():
            return ids
        if len(text) == 1:
            return self._in_bytes(text.encode())
        half = len(text) // 2
        return self._exact(text[:half]) + self._exact(text[half:])

    def _encode(self, text: str) -> list[int]:
        if not self._tokenizer.strips_first_space:
            return self._tokenizer.encode(text, special=False)
        ids = self._tokenizer.encode(_ANCHOR + text, special=False)
        before = len(_ANCHOR) + 1
        return [token for token, end in zip(ids, self.ends(ids), strict=True) if end > before]

    def _in_bytes(self, text: bytes) -> list[int]:
        return [self._bytes[byte] for byte in text if byte in self._bytes]


def without_cut_letter(text: bytes) -> bytes:
    """Without the first bytes of a letter whose others are still to come."""
    for back, byte in enumerate(reversed(text[-3:]), 1):
        if byte & 0xC0 != 0x80:  # the first byte of a letter
            length = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return text[:-back] if length > back else text
    return text
