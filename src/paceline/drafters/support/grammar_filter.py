"""Which drafted tokens are grammar-valid, and which are forced."""

from collections.abc import Sequence
from typing import Final

from paceline.types import ROOT, Cursor, Draft

FORCED: Final = 1.0  # the score of a token without alternative
MAX_UNFORCED: Final = 0.999999  # the highest score of any other


def unforced(score: float) -> float:
    """A score below 1, however likely the token: only a grammar can force one."""
    return min(score, MAX_UNFORCED)


def valid_prefix(cursor: Cursor, tokens: Sequence[int], until_forced: bool = False) -> tuple[int, Cursor]:
    """The length of the longest grammar-valid prefix, and the state after it; `cursor` does not move.

    until_forced: after the first token, not past a position where the grammar forces the next one.
    """
    at, taken = cursor.fork(), 0
    if not until_forced:
        return at.advance_along(tokens), at
    for token in tokens:
        if at.finished or (taken and at.forced()) or not at.advance(token):
            break
        taken += 1
    return taken, at


def grammar_valid(cursor: Cursor, draft: Draft) -> Draft:
    """The draft without the nodes that are not grammar-valid, and without their descendants.

    Sampled drafts stay as they are: dropping a node for its token would make its q wrong.
    """
    if draft.q is not None:
        return draft
    if draft.parents is None:
        return draft.first(valid_prefix(cursor, draft.tokens)[0])
    nodes = _valid_nodes(cursor, draft.tokens, draft.parents)
    if len(nodes) == len(draft):
        return draft
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
    return Draft(
        tuple(draft.tokens[i] for i in nodes),
        tuple(number[draft.parents[i]] for i in nodes),
        tuple(draft.sources[i] for i in nodes) if draft.sources else (),
        tuple(draft.scores[i] for i in nodes) if draft.scores else (),
    )


def _valid_nodes(cursor: Cursor, tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[int]:
    states = {ROOT: cursor}  # after each valid node
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        before = states.get(parent)
        if before is not None and not before.finished:
            after = before.fork()
            if after.advance(token):
                states[node] = after
    return [node for node in states if node != ROOT]
