"""What may follow each guess of a draft: masks for all of them, in one walk of the grammar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.errors import ConstraintError
from paceline.types import ROOT, Bits, Cursor, Draft

Row = Bits | ConstraintError | None  # None: any token may come; an error: why nobody can say


@dataclass(frozen=True, slots=True)
class Masks:
    """Row node + 1 is what may follow that node; row 0, what may follow the text. No rows: anything may."""

    rows: Sequence[Row]

    def after(self, node: int) -> Bits | None:
        """None: anything may. Raises what went wrong there, which matters only if the output comes by."""
        row = self.rows[node + 1] if self.rows else None
        if isinstance(row, ConstraintError):
            raise row
        return row


FREE: Final = Masks(())
UNREACHABLE: Final = ConstraintError("a row was read that no legal text leads to")


def refused(token: int) -> ConstraintError:
    return ConstraintError(f"the grammar allowed token {token} and then could not take it")


def words(vocab: int) -> int:
    """The length of a row of bits."""
    return (vocab + 31) // 32


def masks(cursor: Cursor, draft: Draft, width: int) -> Masks:
    """`cursor` stands where the draft begins, and stays there. width: that of a row, in words.

    The target never chooses a node that the grammar forbids, so nothing is known of what follows one. What
    follows an end is never committed, so anything may.
    """
    cursors: dict[int, Cursor] = {ROOT: cursor}
    rows: list[Row] = [_filled(cursor, width)]
    for node, token in enumerate(draft.tokens):
        before = cursors.get(draft.parent(node))
        row: Row = UNREACHABLE
        if before is not None and before.finished:
            cursors[node], row = before, None
        elif before is not None and _legal(rows[draft.parent(node) + 1], token):
            alone = draft.parents is None and node  # in a chain nobody comes back to the node before
            here = before if alone else before.fork()
            if here.advance(token):
                cursors[node], row = here, _filled(here, width)
            else:
                row = refused(token)
        rows.append(row)
    return Masks(rows)


def _filled(cursor: Cursor, width: int) -> Row:
    if cursor.finished:
        return None
    row: Bits = np.zeros(width, np.uint32)
    try:
        return row if cursor.fill(row) else None
    except ConstraintError as error:
        return error


def _legal(row: Row, token: int) -> bool:
    return row is None or (not isinstance(row, ConstraintError) and allows(row, token))


def allows(row: Bits, token: int) -> bool:
    return bool(row[token // 32] >> np.uint32(token % 32) & np.uint32(1))
