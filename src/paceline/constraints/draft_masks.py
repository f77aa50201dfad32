"""Token masks for every node of a draft, in one walk of the grammar."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.errors import ConstraintError
from paceline.types import ROOT, Bits, Cursor, Draft

Row = Bits | ConstraintError | None  # None: any token may follow; an error: the mask is not known


@dataclass(frozen=True, slots=True)
class Masks:
    """Row 0 is the mask after the text, row node + 1 the mask after that node. No rows: no constraint."""

    rows: Sequence[Row]

    def after(self, node: int) -> Bits | None:
        """None: any token may follow. Raises the node's error, which counts only if the output gets here."""
        row = self.rows[node + 1] if self.rows else None
        if isinstance(row, ConstraintError):
            raise row
        return row


FREE: Final = Masks(())
UNREACHABLE: Final = ConstraintError("the mask after a token that the grammar forbids is not known")


def rejected(token: int) -> ConstraintError:
    return ConstraintError(f"the grammar allowed token {token} and then could not take it")


def words(vocab: int) -> int:
    """32-bit words in a row."""
    return (vocab + 31) // 32


def masks(cursor: Cursor, draft: Draft, width: int, late: Callable[[], bool] = lambda: False) -> Masks:
    """`cursor` is at the draft's root, and stays there. width: words in a row.

    late: once it returns True, only the first row is needed.

    The target never chooses a node that the grammar forbids, so there is no mask after one. A token after an
    end is never committed, so any may follow.
    """
    try:
        cursor.settle()
    except ConstraintError as error:
        return Masks([error, *(UNREACHABLE for _ in draft.tokens)])
    cursors: dict[int, Cursor] = {ROOT: cursor}
    rows: list[Row] = [_filled(cursor, width)]
    for node, token in enumerate(draft.tokens):
        if late():
            break
        before = cursors.get(draft.parent(node))
        row: Row = UNREACHABLE
        if before is not None and before.finished:
            cursors[node], row = before, None
        elif before is not None and _allowed(rows[draft.parent(node) + 1], token):
            alone = draft.parents is None and node  # in a chain the node before has no other child
            here = before if alone else before.fork()
            if here.advance(token):
                cursors[node], row = here, _filled(here, width)
            else:
                row = rejected(token)
        rows.append(row)
    return Masks(rows)


def without_ends(found: Masks, draft: Draft, ends: frozenset[int], missing: int, vocab: int) -> Masks:
    """The masks of a draft where `missing` more tokens must come before one of `ends` may.

    A grammar that allows nothing else is complete: there the output may end.
    """
    forbidden = bits(ends, vocab)
    rows = found.rows or [None] * (1 + len(draft))
    nodes = (ROOT, *range(len(draft)))
    return Masks(
        [
            _without(row, forbidden, vocab) if draft.depth(node) < missing else row
            for node, row in zip(nodes, rows, strict=True)
        ]
    )


def bits(tokens: Iterable[int], vocab: int) -> Bits:
    """The row that allows these tokens."""
    row: Bits = np.zeros(words(vocab), np.uint32)
    ids = np.fromiter(tokens, np.int64)
    ids = ids[(ids >= 0) & (ids < vocab)]
    np.bitwise_or.at(row, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return row


def _without(row: Row, forbidden: Bits, vocab: int) -> Row:
    if isinstance(row, ConstraintError):
        return row
    rest = (_all(vocab) if row is None else row) & ~forbidden
    return rest if rest.any() else row


def _all(vocab: int) -> Bits:
    row: Bits = np.full(words(vocab), 0xFFFFFFFF, np.uint32)
    if vocab % 32:
        row[-1] = (1 << vocab % 32) - 1
    return row


def _filled(cursor: Cursor, width: int) -> Row:
    if cursor.finished:
        return None
    row: Bits = np.zeros(width, np.uint32)
    try:
        return row if cursor.fill(row) else None
    except ConstraintError as error:
        return error


def _allowed(row: Row, token: int) -> bool:
    return row is None or (not isinstance(row, ConstraintError) and allows(row, token))


def allows(row: Bits, token: int) -> bool:
    return bool(row[token // 32] >> np.uint32(token % 32) & np.uint32(1))
