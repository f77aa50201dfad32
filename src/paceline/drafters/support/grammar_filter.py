"""What drafters share: which guesses the grammar of the output can take, and which are certain."""

from collections.abc import Iterable
from typing import Final

from paceline.types import ROOT, Cursor, Draft

CERTAIN: Final = 1.0
NEARLY: Final = 0.999999


def unsure(score: float) -> float:
    """The score of a guess, however likely: only a grammar can be certain."""
    return min(score, NEARLY)


def walk(cursor: Cursor, tokens: Iterable[int], until_forced: bool = False) -> tuple[int, Cursor]:
    """How many of the tokens can be taken one after the other, and where that leads.

    until_forced: not past a place, after the first token, where the grammar leaves no choice.
    """
    at, taken = cursor.fork(), 0
    for token in tokens:
        if at.finished or (until_forced and taken and at.forced()) or not at.advance(token):
            break
        taken += 1
    return taken, at


def legal(cursor: Cursor, draft: Draft) -> Draft:
    """The draft without the nodes that cannot be taken, and without what follows them.

    Guesses that were drawn stay as they are: to drop one for what it says would make its q wrong.
    """
    if draft.q is not None:
        return draft
    if draft.parents is None:
        return draft.first(walk(cursor, draft.tokens)[0])
    kept = _taken(cursor, draft.tokens, draft.parents)
    if len(kept) == len(draft):
        return draft
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
    return Draft(
        tuple(draft.tokens[i] for i in kept),
        tuple(number[draft.parents[i]] for i in kept),
        tuple(draft.sources[i] for i in kept) if draft.sources else (),
        tuple(draft.scores[i] for i in kept) if draft.scores else (),
    )


def _taken(cursor: Cursor, tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[int]:
    places = {ROOT: cursor}  # where each node that can be taken leads
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        before = places.get(parent)
        if before is not None and not before.finished:
            after = before.fork()
            if after.advance(token):
                places[node] = after
    return [node for node in places if node != ROOT]
