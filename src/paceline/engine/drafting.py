"""Drafting for a pass: the drafters of each sequence, their budgets, and the part of each draft to verify."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from time import perf_counter_ns
from typing import Final

from torch import Tensor

from paceline.constraints.draft_masks import FREE
from paceline.drafters.drafter_list import DrafterList, Failure
from paceline.engine.scheduler import Scheduled
from paceline.errors import UsageError, unknown_name
from paceline.types import Ask, Controller, Cursor, Draft, Drafter, HiddenRows, Scores, Seq, Target

MAX_FORCED: Final = 32  # nodes of one draft that the grammar forces
MAX_LISTS: Final = 256  # lists of drafters that are remembered while no sequence uses them


class Drafting:
    """The drafters of an engine, and the controller that decides how much of their drafts to verify."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        timer: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._target, self._timer = target, timer
        self._drafters = dict(drafters)
        self._controller = controller
        self._lists: dict[tuple[str, ...], DrafterList] = {}  # oldest first
        self._running: Counter[tuple[str, ...]] = Counter()  # sequences by list
        self._failures: set[Failure] = set()  # those logged already

    def drafter(self, seq: Seq) -> DrafterList:
        """The request's list of drafters, as one drafter."""
        names = seq.spec.drafters
        if names not in self._lists:
            if unknown := [n for n in names if n not in self._drafters]:
                raise UsageError(unknown_name("drafter", unknown[0], sorted(self._drafters)))
            self._forget_idle_list()
            members = [self._drafters[n] for n in names]
            self._lists[names] = DrafterList(
                members, self._controller.policy(names), self._failures, self._timer
            )
        return self._lists[names]

    def _forget_idle_list(self) -> None:
        """Makes room for another list: requests may name drafters in any order."""
        idle = (names for names in self._lists if not self._running[names])
        if len(self._lists) >= MAX_LISTS and (oldest := next(idle, None)) is not None:
            del self._lists[oldest]

    def begin(self, seq: Seq) -> None:
        self._running[seq.spec.drafters] += 1
        self.drafter(seq).begin(seq)

    def prepare(self, scheduled: Sequence[Scheduled]) -> None:
        """While a pass runs beside the engine: what drafters have put off, and prompts that are in it."""
        done: set[str] = set()
        for names in self._running:
            if (drafters := self._lists.get(names)) is not None:
                drafters.idle(done)
        for s in scheduled:
            if len(s.seq.tokens) == s.seq.prompt_len and s.seq.spec.max_draft:
                self.drafter(s.seq).prepare(s.seq)

    def end(self, seq: Seq) -> None:
        names = seq.spec.drafters
        self._running[names] -= 1
        if self._running[names] <= 0:
            del self._running[names]
        self.drafter(seq).end(seq)
        self._controller.end(seq)

    def replace_drafter(self, drafter: Drafter, running: Sequence[Seq]) -> None:
        """Replaces the drafter of the same name and drops all estimates about it."""
        name = drafter.name
        self._drafters[name] = drafter
        self._controller.forget(name)
        self._lists = {names: members for names, members in self._lists.items() if name not in names}
        self._failures = {failure for failure in self._failures if failure[0] != name}
        alone = DrafterList([drafter], failures=self._failures)
        for seq in running:
            if name in seq.spec.drafters:
                alone.begin(seq)

    def taps(self, scheduled: Sequence[Scheduled]) -> tuple[int, ...]:
        taps: set[int] = set()
        for s in scheduled:
            if s.seq.reader is not None:
                taps.update(s.seq.reader.taps)
            if (drafter := self.drafter(s.seq)).taps:
                s.readers = drafter.readers(s.seq)
                if s.readers:
                    taps.update(drafter.taps_of(s.readers))
        return tuple(sorted(taps))

    def plan(self, scheduled: Sequence[Scheduled], waiting: int = 0) -> None:
        """Sets the budgets: at most what the controller and the request allow.

        waiting: sequences that have no part in this pass, and no token yet.
        """
        rows, scored = sum([len(s.fed) for s in scheduled]), [s for s in scheduled if s.scored]
        waiting += sum([not s.scored and not s.seq.prefill for s in scheduled])
        budgets = self._controller.plan([s.seq for s in scored], rows, waiting)
        for s, budget in zip(scored, budgets, strict=True):
            s.budget = max(0, min(budget, s.seq.spec.max_draft))
            if s.budget and not self.drafter(s.seq).worth_asking(s.seq):
                s.budget = 0

    def _may_draft(self, s: Scheduled) -> bool:
        """Cuts the budget to what the output, the context and the pass have room for.

        Tokens that the grammar forces are drafted besides, in passes that have a budget at all.
        """
        seq, target = s.seq, self._target
        if s.masks is not FREE:  # a mask computed before is that of an empty draft
            s.budget = 0
            return False
        room = min(seq.prompt_len + seq.params.max_tokens, target.max_context) - len(seq.tokens) - 1
        room = max(0, min(room, target.invariant_rows - len(s.fed)))
        s.budget = min(s.budget, room)
        if seq.cursor is not None:
            s.forced_budget = min(MAX_FORCED, room - s.budget)
        return room > 0

    def draft(self, scheduled: Sequence[Scheduled]) -> tuple[dict[str, int], int]:
        """Sets the drafts; returns microseconds by drafter, and the part of them that is older.

        That is for reading the hidden states of the pass before.
        """
        draft_ns = self._read_ns()
        read_us = sum([ns // 1000 for ns in draft_ns.values()])
        asking = [s for s in scheduled if s.budget and self._may_draft(s)]
        if not asking:
            return {name: ns // 1000 for name, ns in draft_ns.items()}, read_us
        for group in _by_drafters(asking):
            drafter = self.drafter(group[0].seq)
            asks = [Ask(s.seq, s.budget, (), _hints(s.seq), s.forced_budget) for s in group]
            for s, draft in zip(group, drafter.draft(asks), strict=True):
                s.drafted, s.asked = len(draft), tuple(drafter.asked.get(s.seq.id, ()))
                draft = _above_threshold(draft.first(s.budget + s.forced_budget), s.seq.spec.threshold)
                s.draft = self._usable(draft, drafter.name)
            for name, ns in drafter.draft_ns.items():
                draft_ns[name] = draft_ns.get(name, 0) + ns
        rows = sum(len(s.fed) for s in scheduled)
        lengths = self._controller.trim([s.seq for s in asking], [s.draft for s in asking], rows)
        for s, nodes in zip(asking, lengths, strict=True):
            s.uncut, s.draft = s.draft, s.draft.first(nodes)
        return {name: ns // 1000 for name, ns in draft_ns.items()}, read_us

    def _read_ns(self) -> dict[str, int]:
        """Nanoseconds since the last call, by drafter."""
        spent: dict[str, int] = {}
        for drafters in self._lists.values():
            for name, ns in drafters.read_ns.items():
                spent[name] = spent.get(name, 0) + ns
            drafters.read_ns.clear()
        return spent

    def observe(self, scheduled: Sequence[Scheduled], scores: Scores) -> None:
        """Gives each list of drafters the hidden rows, the verdicts and the scores of its sequences."""
        if scores.hidden:
            self._show_hidden(scheduled, scores)
        if not any(drafters.observes for drafters in self._lists.values()):
            return
        number = {s.seq.id: i for i, s in enumerate(scheduled)}
        for group in _by_drafters([s for s in scheduled if s.verdict is not None]):
            drafter = self.drafter(group[0].seq)
            if not drafter.observes:
                continue
            verdicts, of_group = [s.verdict for s in group if s.verdict is not None], scores
            if len(group) < len(scheduled):
                feeds = [number[s.seq.id] for s in group]
                starts = tuple(scores.starts[i] for i in feeds)
                rows = tuple(scores.rows[i] for i in feeds) if scores.rows else ()
                of_group = replace(scores, starts=starts, rows=rows)
            drafter.observe([s.seq for s in group], verdicts, of_group)

    def _show_hidden(self, scheduled: Sequence[Scheduled], scores: Scores) -> None:
        first_rows = dict(zip((s.seq.id for s in scheduled), scores.rows, strict=False))
        for s in scheduled:
            if (reader := s.seq.reader) is not None and s.kept_nodes is not None:
                tapped = {tap: scores.hidden[tap] for tap in reader.taps}
                reader.on_hidden(_hidden_rows(s, s.kept_nodes, first_rows[s.seq.id], tapped))
        committed = [s for s in scheduled if s.kept_nodes is not None and s.readers]
        for group in _by_drafters(committed):
            drafter = self.drafter(group[0].seq)
            hidden = {tap: scores.hidden[tap] for tap in drafter.taps if tap in scores.hidden}
            readers = {s.seq.id: s.readers for s in group}
            rows = [
                _hidden_rows(s, s.kept_nodes, first_rows[s.seq.id], hidden)
                for s in group
                if s.kept_nodes is not None
            ]
            drafter.show_hidden(rows, readers)

    def _usable(self, draft: Draft, name: str) -> Draft:
        """The draft up to the first token outside the target's vocabulary, each node with a source."""
        tokens, vocab = draft.tokens, self._target.vocab_size
        if not tokens:
            return draft
        if not draft.sources:
            draft = replace(draft, sources=(name,) * len(tokens))
        if 0 <= min(tokens) <= max(tokens) < vocab:
            return draft
        return draft.first(next(i for i, token in enumerate(tokens) if not 0 <= token < vocab))


def _by_drafters(scheduled: Sequence[Scheduled]) -> Iterator[list[Scheduled]]:
    """Sequences with the same list of drafters, together."""
    if not scheduled:
        return
    first = scheduled[0].seq.spec.drafters
    if all(s.seq.spec.drafters == first for s in scheduled):
        yield list(scheduled)
        return
    ordered = sorted(scheduled, key=lambda s: s.seq.spec.drafters)
    for _, group in groupby(ordered, key=lambda s: s.seq.spec.drafters):
        yield list(group)


def _hints(seq: Seq) -> Cursor | None:
    return None if seq.cursor is None else seq.cursor.hints()


def _hidden_rows(
    s: Scheduled, nodes: tuple[int, ...], first: int, hidden: Mapping[int, Tensor]
) -> HiddenRows:
    """nodes: those whose cache rows stay. first: the sequence's first row of the pass."""
    fed, seq = len(s.fed), s.seq
    rows: slice | list[int] = slice(first, first + fed + len(nodes))
    if nodes != tuple(range(len(nodes))):
        rows = [*range(first, first + fed), *(first + fed + node for node in nodes)]
    start = seq.computed - fed - len(nodes)
    return HiddenRows(seq, start, hidden, rows)


def _above_threshold(draft: Draft, threshold: float) -> Draft:
    """The draft up to the first node below the threshold; sampled nodes stay, whatever their token."""
    if draft.q is not None or not threshold:
        return draft
    below = (i for i, score in enumerate(draft.scores) if score < threshold)
    return draft.first(next(below, len(draft)))
