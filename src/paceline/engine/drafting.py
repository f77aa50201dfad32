"""Who guesses for whom, how far, and what of it goes into the pass."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.support.guard import drafts_of, forgiven
from paceline.engine.scheduled import Scheduled, by_drafters
from paceline.errors import UsageError
from paceline.strings import unknown_name
from paceline.types import Ask, Controller, Draft, Drafter, HiddenRows, Scores, Seq, Target

MOST_CERTAIN: Final = 32  # guesses that cannot be wrong, in one draft


class Drafting:
    """The drafters of an engine, and the controller that says how much of them is worth it."""

    def __init__(self, target: Target, drafters: Mapping[str, Drafter], controller: Controller) -> None:
        self._target = target
        self._drafters = dict(drafters)
        self._controller = controller
        self._lists: dict[tuple[str, ...], DrafterList] = {}

    def drafter(self, seq: Seq) -> DrafterList:
        """The request's list of drafters, as one drafter."""
        names = seq.spec.drafters
        if names not in self._lists:
            if unknown := [n for n in names if n not in self._drafters]:
                raise UsageError(unknown_name("drafter", unknown[0], sorted(self._drafters)))
            self._lists[names] = DrafterList([self._drafters[n] for n in names])
        return self._lists[names]

    def begin(self, seq: Seq) -> None:
        self.drafter(seq).begin(seq)

    def end(self, seq: Seq) -> None:
        self.drafter(seq).end(seq)

    def replace_drafter(self, drafter: Drafter, running: Sequence[Seq]) -> None:
        """Puts a drafter in the place of the one with its name, of which nothing is remembered."""
        self._drafters[drafter.name] = drafter
        self._controller.forget(drafter.name)
        self._lists = {names: relay for names, relay in self._lists.items() if drafter.name not in names}
        for seq in running:
            if drafter.name in seq.spec.drafters:
                with forgiven(drafter, "goes on without it"):
                    drafter.begin(seq)

    def taps(self, turns: Sequence[Scheduled]) -> tuple[int, ...]:
        return tuple(sorted({tap for t in turns for tap in self.drafter(t.seq).taps}))

    def plan(self, turns: Sequence[Scheduled]) -> None:
        rows = sum(len(t.fed) for t in turns)
        for turn, budget in zip(turns, self._controller.plan([t.seq for t in turns], rows), strict=True):
            seq, most = turn.seq, self._target.max_context
            room = min(seq.prompt_len + seq.params.max_tokens, most) - len(seq.tokens) - 1
            room = min(room, self._target.invariant_rows - len(turn.fed)) if turn.scored else 0
            turn.budget = max(0, min(budget, seq.spec.max_draft, room))
            if seq.cursor is not None and seq.spec.max_draft:
                turn.forced_budget = max(0, min(MOST_CERTAIN, room - turn.budget))

    def draft(self, turns: Sequence[Scheduled]) -> dict[str, int]:
        """Microseconds by drafter."""
        took: Counter[str] = Counter()
        asking = [t for t in turns if t.budget or t.forced_budget]
        for group in by_drafters(asking):
            drafter = self.drafter(group[0].seq)
            asks = [Ask(t.seq, t.budget, cursor=t.seq.cursor, forced_budget=t.forced_budget) for t in group]
            for turn, draft in zip(group, drafts_of(drafter, asks), strict=True):
                turn.drafted = len(draft)
                draft = _sure(draft.first(turn.budget + turn.forced_budget), turn.seq.spec.threshold)
                turn.draft = self._usable(draft, drafter.name)
            took.update(drafter.took_ns)
        rows = sum(len(t.fed) for t in turns)
        kept = self._controller.trim([t.seq for t in asking], [t.draft for t in asking], rows)
        for turn, nodes in zip(asking, kept, strict=True):
            turn.draft = turn.draft.first(nodes)
        return {name: ns // 1000 for name, ns in took.items()}

    def observe(self, turns: Sequence[Scheduled], scores: Scores) -> None:
        self._show(turns, scores)
        number = {t.seq.id: i for i, t in enumerate(turns)}
        for group in by_drafters([t for t in turns if t.verdict is not None]):
            places = [number[t.seq.id] for t in group]
            verdicts = [t.verdict for t in group if t.verdict is not None]
            starts = tuple(scores.starts[i] for i in places)
            rows = tuple(scores.rows[i] for i in places) if scores.rows else ()
            of_group = replace(scores, starts=starts, rows=rows)
            self.drafter(group[0].seq).observe([t.seq for t in group], verdicts, of_group)

    def _show(self, turns: Sequence[Scheduled], scores: Scores) -> None:
        """Lets those who have taps read what the target made of the tokens that stay."""
        first_of = dict(zip((t.seq.id for t in turns), scores.rows, strict=False))
        for group in by_drafters([t for t in turns if t.kept is not None and self.drafter(t.seq).taps]):
            drafter = self.drafter(group[0].seq)
            hidden = {tap: scores.hidden[tap] for tap in drafter.taps}
            seen = [_seen(t, t.kept, first_of[t.seq.id], hidden) for t in group if t.kept is not None]
            drafter.on_hidden(seen)

    def _usable(self, draft: Draft, name: str) -> Draft:
        """The draft up to the first token the target does not have, each node with a source."""
        if not draft.sources:
            draft = replace(draft, sources=(name,) * len(draft))
        bad = (i for i, token in enumerate(draft.tokens) if not 0 <= token < self._target.vocab_size)
        return draft.first(next(bad, len(draft)))


def _seen(turn: Scheduled, kept: tuple[int, ...], first: int, hidden: Mapping[int, Tensor]) -> HiddenRows:
    fed, seq = len(turn.fed), turn.seq
    rows: slice | list[int] = slice(first, first + fed + len(kept))
    if kept != tuple(range(len(kept))):
        rows = [*range(first, first + fed), *(first + fed + node for node in kept)]
    start = seq.computed - fed - len(kept)
    return HiddenRows(seq, start, hidden, rows)


def _sure(draft: Draft, threshold: float) -> Draft:
    """The draft up to the first guess that is too unsure; one that was drawn must stay, whatever it says."""
    if draft.q is not None or not threshold:
        return draft
    unsure = (i for i, score in enumerate(draft.scores) if score < threshold)
    return draft.first(next(unsure, len(draft)))
