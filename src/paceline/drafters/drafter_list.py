"""A list of drafters is a drafter: the first that has a guess answers.

Where that guess is unsure or short, a trained head of the list is asked too, if that is likely to be worth
its time: to do better, or to go on where the guess ends.

Where the output has a grammar and its drafter is among them, they take turns: the tokens that must come, then
whoever fills the free part, then the next tokens that must come.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

from paceline.drafters.support.grammar_filter import CERTAIN, legal, unsure, walk
from paceline.drafters.support.guard import drafts_of, forgiven
from paceline.drafters.support.worth import Worth
from paceline.types import NO_DRAFT, ROOT, Ask, Cursor, Draft, Drafter, HiddenRows, Scores, Seq, Verdict

if TYPE_CHECKING:
    from torch import Tensor


class DrafterList(Drafter):
    """Each leg of a draft is by one drafter, who is asked in one call for all sequences."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in self.drafters)
        self.taps = tuple(sorted({tap for drafter in self.drafters for tap in drafter.taps}))
        self.took_ns: Counter[str] = Counter()  # of the last draft, by drafter
        self._turns = any(drafter.interleaves for drafter in self.drafters)
        self._heads = tuple(drafter for drafter in self.drafters[1:] if drafter.taps)
        self._worth = Worth()

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.took_ns.clear()
        runs = [
            _Run(ask if self._turns or not ask.forced_budget else replace(ask, forced_budget=0))
            for ask in asks
        ]
        running = [run for run in runs if not run.over]
        legs = 0
        while running:
            self._leg(running, legs)
            legs += 1
            running = [run for run in running if len(run.legs) == legs and not run.over]
        for head in self._heads:
            self._weigh(head, [run for run in runs if run.may_weigh(head)])
        self._worth.pass_begins()
        return [run.draft() for run in runs]

    def _weigh(self, head: Drafter, runs: Sequence["_Run"]) -> None:
        """Lets a head do better than what there is, or go on after it."""
        asked = [(run, ask) for run in runs if (ask := self._worth.further(head, run.ask, run.legs[0]))]
        drafts = self._ask(head, [ask for _, ask in asked]) if asked else []
        for (run, ask), draft in zip(asked, drafts, strict=True):
            if ask is not run.ask:
                run.legs += [draft] if draft else []
            elif self._worth.expects(draft)[0] > self._worth.expects(run.legs[0])[0]:
                run.legs = [draft]

    def _ask(self, drafter: Drafter, asks: Sequence[Ask]) -> list[Draft]:
        started = perf_counter_ns()
        drafts = drafts_of(drafter, asks)
        took = perf_counter_ns() - started
        self.took_ns[drafter.name] += took
        if drafter in self._heads:
            whole = [draft for ask, draft in zip(asks, drafts, strict=True) if not ask.after]
            self._worth.drafted(drafter, whole, took)
        return drafts

    def _leg(self, runs: Sequence["_Run"], before: int) -> None:
        """One more leg for each run that someone has a guess for; they have `before` legs so far."""
        for drafter in self.drafters:
            asked = [run for run in runs if len(run.legs) == before and run.may_ask(drafter)]
            free = [run for run in asked if run.ask.cursor is None] if drafter in self._heads else []
            if free and not self._worth.pays(drafter):
                asked = [run for run in asked if run not in free]
            if asked:
                drafts = self._ask(drafter, [run.ask for run in asked])
                for run, draft in zip(asked, drafts, strict=True):
                    run.take(drafter, draft)

    def begin(self, seq: Seq) -> None:
        for drafter in self.drafters:
            with forgiven(drafter, "begins without it"):
                drafter.begin(seq)

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        self._worth.judged(verdicts)
        for drafter in self.drafters:
            with forgiven(drafter, "goes on"):
                drafter.observe(seqs, verdicts, scores)

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        for drafter in self.drafters:
            if drafter.taps:
                with forgiven(drafter, "goes on"):
                    drafter.on_hidden(hidden_rows)

    def end(self, seq: Seq) -> None:
        for drafter in self.drafters:
            with forgiven(drafter, "ends all the same"):
                drafter.end(seq)


class _Run:
    """One draft on its way from drafter to drafter."""

    __slots__ = ("ask", "last", "legs", "over", "rejected_sources")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask  # what is wanted after the legs so far
        self.legs: list[Draft] = []
        self.last: Drafter | None = None  # whose leg was the last
        self.rejected_sources: list[str] = []  # who made each guess that the grammar cannot take
        self.over = ask.cursor is not None and ask.cursor.finished

    def may_ask(self, drafter: Drafter) -> bool:
        if self.ask.cursor is None:
            return True
        if self.last is not None:
            turn = drafter.interleaves or self.last.interleaves
            if not turn or drafter is self.last:
                return False
        return self.ask.budget > 0 or (drafter.interleaves and self.ask.forced_budget > 0)

    def may_weigh(self, head: Drafter) -> bool:
        """Whether what there is may be dropped for what it says: not where it was drawn, or has a grammar."""
        if self.ask.cursor is not None or len(self.legs) != 1 or self.last is head or self.ask.budget < 1:
            return False
        spec, leg = self.ask.seq.spec, self.legs[0]
        signed = len(leg.scores) == len(leg.sources) == len(leg)
        return spec.accept == "match" and spec.tree_width == 1 and leg.parents is None and signed

    def take(self, drafter: Drafter, draft: Draft) -> None:
        """Adds a leg, if anything of the draft is wanted and can be taken."""
        leg, end = (draft, None) if self.ask.cursor is None else self._leg(drafter, draft, self.ask.cursor)
        if leg:
            self.legs.append(leg)
            self.last = drafter
            self.over = end is None or end.finished
            if end is not None:
                self.ask = _after(self.ask, leg, end)

    def _leg(self, drafter: Drafter, draft: Draft, cursor: Cursor) -> tuple[Draft, Cursor | None]:
        """What there is to add, and where it ends: None for a tree, and for one drawn against the grammar.

        A bare leg ends where tokens are forced: those who are certain of them go on.
        """
        draft = _signed(draft, drafter)
        if not is_chain(draft):
            fit = legal(cursor, draft)
            self.rejected_sources += (Counter(draft.sources) - Counter(fit.sources)).elements()
            return _wanted(fit, self.ask), None
        draft = _wanted(draft, self.ask)
        hand_over = draft.q is None and self.ask.forced_budget > 0 and not drafter.interleaves
        taken, end = walk(cursor, draft.tokens, until_forced=hand_over)
        if draft.q is None:
            if not end.finished and not (hand_over and taken and end.forced()):
                self.rejected_sources += draft.sources[taken:]
            return draft.first(taken), end
        return draft, end if taken == len(draft) else None

    def draft(self) -> Draft:
        whole = joined(self.legs)
        return (
            replace(whole, rejected_sources=tuple(self.rejected_sources)) if self.rejected_sources else whole
        )


def is_chain(draft: Draft) -> bool:
    return draft.parents is None or draft.parents == tuple(range(ROOT, len(draft) - 1))


def _signed(draft: Draft, drafter: Drafter) -> Draft:
    """Each node with its source; only those who take turns can be certain."""
    sources = draft.sources or (drafter.name,) * len(draft)
    scores = draft.scores if drafter.interleaves else tuple(unsure(score) for score in draft.scores)
    return replace(draft, sources=sources, scores=scores)


def _wanted(draft: Draft, ask: Ask) -> Draft:
    """The first nodes, up to the first that is one too many of its kind."""
    left = {True: ask.forced_budget, False: ask.budget}
    for node in range(len(draft)):
        certain = _certain(draft, node)
        if not left[certain]:
            return draft.first(node)
        left[certain] -= 1
    return draft


def _certain(draft: Draft, node: int) -> bool:
    return draft.q is None and len(draft.scores) > node and draft.scores[node] == CERTAIN


def _after(ask: Ask, leg: Draft, end: Cursor) -> Ask:
    certain = sum(_certain(leg, node) for node in range(len(leg)))
    budget = ask.budget - (len(leg) - certain)
    return Ask(ask.seq, budget, (*ask.after, *leg.tokens), end, ask.forced_budget - certain)


def joined(legs: Sequence[Draft]) -> Draft:
    """One draft of legs that follow one another; all but the last are chains."""
    if len(legs) < 2:
        return legs[0] if legs else NO_DRAFT
    tokens = tuple(token for leg in legs for token in leg.tokens)
    sources = tuple(source for leg in legs for source in leg.sources)
    scores = tuple(score for leg in legs for score in leg.scores)
    return Draft(tokens, _parents(legs), sources, scores if all(leg.scores for leg in legs) else (), _q(legs))


def _parents(legs: Sequence[Draft]) -> tuple[int, ...] | None:
    if is_chain(legs[-1]):
        return None
    start = sum(len(leg) for leg in legs[:-1])
    return (*range(ROOT, start - 1), *(start + legs[-1].parent(node) for node in range(len(legs[-1]))))


def _q(legs: Sequence[Draft]) -> "Tensor | None":
    """A bare guess is as one drawn from the law that says nothing else."""
    drawn = [leg.q for leg in legs if leg.q is not None]
    if not drawn:
        return None
    vocab, start = drawn[0].shape[1], 0
    rows = drawn[0].new_zeros(sum(len(leg) for leg in legs), vocab)
    for leg in legs:
        if leg.q is not None:
            rows[start : start + len(leg)] = leg.q
        else:
            for node, token in enumerate(leg.tokens, start):
                if 0 <= token < vocab:
                    rows[node, token] = 1
        start += len(leg)
    return rows
