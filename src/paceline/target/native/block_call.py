"""What a call of the native drafter hands over, as block_model.h lays it out."""

import ctypes as c
import struct
from collections.abc import Sequence
from typing import Any, Final

from paceline.heads.block import BlockConfig
from paceline.heads.runner import SampleCall
from paceline.target.native import library

_PART: Final = struct.Struct("@2P2i")
_TEXT: Final = struct.Struct("@3P4i")
_CHAIN: Final = struct.Struct("@2P4i3P")
_KEY: Final = struct.Struct("@2I")
_DRAFTING: Final = struct.Struct("@2i3P2i3P2i4P")
_STRUCTS: Final = (
    (_PART, library.Part),
    (_TEXT, library.Text),
    (_CHAIN, library.Chain),
    (_DRAFTING, library.DraftCall),
)
assert all(ours.size == c.sizeof(theirs) for ours, theirs in _STRUCTS)


class Call:
    """It is used again: to make it anew, or to set its fields one by one, would take as long as a layer."""

    def __init__(self, shape: BlockConfig) -> None:
        self._taps, self._block, self._many = len(shape.taps), shape.block, 0
        self._hidden_of = struct.Struct(f"@{self._taps}P")
        self._drafting = library.DraftCall()
        self._given = c.byref(self._drafting)
        self.need(1)

    def need(self, many: int) -> None:
        """Room for so many sequences; what was there is lost."""
        if many <= self._many:
            return
        self._many, guesses = many, many * self._block
        self._hidden = (c.c_void_p * (many * self._taps))()  # of each part, of each layer tapped
        self._hidden_at = c.addressof(self._hidden)
        self._parts, self._texts = (library.Part * many)(), (library.Text * many)()
        self._chains = (library.Chain * many)()
        self._keys = (c.c_uint32 * (2 * guesses))()
        self._keys_at = c.addressof(self._keys)
        self.numbers, self.sure = (c.c_int32 * guesses)(), (c.c_float * guesses)()
        lists = self._parts, self._texts, self._chains, self.numbers, self.sure
        self._at = tuple(c.addressof(one) for one in lists)

    def add_part(self, i: int, hidden: Sequence[int], context: int, start: int, rows: int) -> None:
        offset = i * self._hidden_of.size
        self._hidden_of.pack_into(self._hidden, offset, *hidden)
        _PART.pack_into(self._parts, i * _PART.size, self._hidden_at + offset, context, start, rows)

    def add_text(
        self, i: int, context: int, hidden: int, base: int, count: int, position: int, anchor: int
    ) -> None:
        _TEXT.pack_into(self._texts, i * _TEXT.size, context, hidden, base, count, position, anchor, 0)

    def add_chain(
        self, i: int, base: int, hidden: int, place: int, previous: int, steps: int, draw: SampleCall | None
    ) -> None:
        how = (0, 0, 0) if draw is None else self._draw(i * self._block * _KEY.size, draw)
        _CHAIN.pack_into(self._chains, i * _CHAIN.size, base, hidden, place, previous, steps, 0, *how)

    def _draw(self, offset: int, draw: SampleCall) -> tuple[int, int, int]:
        for step, key in enumerate(draw.keys):
            _KEY.pack_into(self._keys, offset + step * _KEY.size, *key)
        return draw.choose, draw.settings, self._keys_at + offset

    def whole(
        self,
        turn: tuple[int, int],
        parts: int,
        texts: int,
        slots: int,
        chains: int,
        steps: int,
        logits: int,
    ) -> Any:
        """To be given to paceline_block_run. turn: where cosines and sines start."""
        part, text, chain, numbers, sure = self._at
        reading = parts, self._taps, part, *turn
        filling = texts, slots, text, *turn
        chaining = chains, steps, chain, numbers, sure, logits
        _DRAFTING.pack_into(self._drafting, 0, *reading, *filling, *chaining)
        return self._given
