"""Token Recycling (arXiv 2408.08696): the candidates of earlier passes, expanded into a tree.

Special here: chances are calibrated by how often candidates are right, and each tenant has its own table.
"""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from paceline.config import require_min, warn_renamed
from paceline.drafters.recycle.table import Successors, Table, largest
from paceline.drafters.support.grammar_filter import unforced
from paceline.types import NO_DRAFT, ROOT, Ask, Cursor, Draft, Drafter, Scores, Seq, Verdict

if TYPE_CHECKING:  # a command that needs no model starts without torch
    from torch import Tensor

Children: TypeAlias = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class RecycleSettings:
    remember: bool = True  # the target's scores are used for later sequences of the tenant
    successors: int = 8  # for each token
    max_lists: int = 400_000  # of successors, of all tenants together; tenants not heard of longest go first
    min_chance: float = 0.02  # a node less likely than this to be accepted is not drafted
    learn: InitVar[bool | None] = None  # the name of `remember` before 0.2

    def __post_init__(self, learn: bool | None) -> None:
        if learn is not None:
            warn_renamed("learn", "remember", stacklevel=4)
            object.__setattr__(self, "remember", learn)
        require_min(self, successors=1, max_lists=1, min_chance=0)


class Recycle(Drafter):
    name = "recycle"
    fingerprint = "1"  # raised where its scores change their meaning

    def __init__(self, settings: RecycleSettings | None = None) -> None:
        self.settings = settings or RecycleSettings()
        self._tenants: dict[str, Table] = {}  # least recently used first
        self._tables: dict[str, Table] = {}  # by sequence: its own or its tenant's

    def begin(self, seq: Seq) -> None:
        table = self._tenants.pop(seq.tenant, None)
        remembered = self.settings.remember and seq.remember and not seq.anonymous
        if table is None:
            table = Table(self.settings.successors)
        elif not remembered:
            self._tenants[seq.tenant] = table
            table = table.copy()
        if remembered:
            self._tenants[seq.tenant] = table
        table.read(seq.tokens)
        self._tables[seq.id] = table
        self._shrink()

    def end(self, seq: Seq) -> None:
        self._tables.pop(seq.id, None)
        self._shrink()

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        for seq, verdict, start in zip(seqs, verdicts, scores.starts, strict=False):  # a replay has no rows
            new = seq.tokens[-len(verdict.path) - 2 :]
            self._learn(self._table(seq), new, verdict, scores.logits[start:])

    def _learn(self, table: Table, new: Sequence[int], verdict: Verdict, rows: "Tensor") -> None:
        """new: the token before the pass, then those it added. Rows of accepted nodes win over others."""
        table.learn(new)
        row_after = {token: 1 + node for node, token in enumerate(verdict.draft.tokens)}
        row_after |= zip(new, (0, *(1 + node for node in verdict.path)), strict=False)
        values, tokens = largest(rows[: 1 + len(verdict.draft)], table.width)
        chances = np.exp(values - values[:, :1])
        chances /= chances.sum(1, keepdims=True)
        chosen = list(row_after.values())
        table.write(list(row_after), tokens[chosen], chances[chosen])

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.budget > 0 else NO_DRAFT for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        width = ask.seq.spec.tree_width
        children = _Children(self._table(ask.seq), ask)
        tokens, parents, scores = best_first(children, ask.budget, width, self.settings.min_chance)
        return Draft(tokens, parents if width > 1 else None, (self.name,) * len(tokens), scores)

    def _table(self, seq: Seq) -> Table:
        if seq.id not in self._tables:
            self.begin(seq)
        return self._tables[seq.id]

    def _shrink(self) -> None:
        held = sum(table.room for table in self._tenants.values())
        while len(self._tenants) > 1 and held > self.settings.max_lists:
            held -= self._tenants.pop(next(iter(self._tenants))).room


class _Children:
    """The grammar-valid candidates after a path of drafted tokens."""

    def __init__(self, table: Table, ask: Ask) -> None:
        self._table = table
        self._last = (ask.after or ask.seq.tokens)[-1]
        self._width = ask.seq.spec.tree_width
        self._cursors: dict[tuple[int, ...], Cursor] = {}  # after each path
        if ask.cursor is not None:
            self._cursors[()] = ask.cursor

    def __call__(self, path: tuple[int, ...]) -> Successors:
        successors = self._table.successors(path[-1] if path else self._last)
        return self._valid(path, successors) if self._cursors else successors

    def _valid(self, path: tuple[int, ...], successors: Successors) -> Successors:
        """The most likely valid ones; the chance of the others is shared out among them."""
        at, free, taken = self._cursors[path], 1.0, list[tuple[int, float]]()
        for token, chance in successors if not at.finished else ():
            after = at.fork()
            if after.advance(token):
                self._cursors[(*path, token)] = after
                taken.append((token, chance))
            else:
                free -= chance
            if len(taken) == self._width:
                break
        return [(token, unforced(chance / max(free, chance))) for token, chance in taken]


class Tree(NamedTuple):
    """The parts of a `Draft`; scores are P(node | its parent)."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


def best_first(children: Children, budget: int, width: int, min_chance: float = 0.0) -> Tree:
    """Best-first search: the `budget` nodes most likely to be accepted, most likely first.

    children: from a path of tokens to the tokens that may follow, each once, with probabilities. It is called
    for nodes in the tree only, in their order, and not once the tree is full. width: the largest number of
    children; 1 makes a chain. min_chance: a node less likely to be accepted is not added. Of equally likely
    nodes the one whose parent came first is first, then the one its parent listed first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # -chance of the path, parent, rank among its siblings, chance, path
    waiting: list[tuple[float, int, int, float, tuple[int, ...]]] = []
    path: tuple[int, ...] = ()
    node, reach = ROOT, 1.0
    while len(tokens) < budget:
        ranked = sorted(children(path), key=_chance, reverse=True)
        for rank, (token, chance) in enumerate(ranked[:width]):
            if chance > 0 and reach * chance >= min_chance:
                heappush(waiting, (-reach * chance, node, rank, chance, (*path, token)))
        if not waiting:
            break
        minus_reach, parent, _, chance, path = heappop(waiting)
        node, reach = len(tokens), -minus_reach
        tokens.append(path[-1])
        parents.append(parent)
        scores.append(chance)
    return Tree(tuple(tokens), tuple(parents), tuple(scores))


def _chance(child: tuple[int, float]) -> float:
    return child[1]
