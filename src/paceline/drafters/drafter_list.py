"""A list of drafters is a drafter: the first with a draft wins, segment by segment.

Where that draft is unsure or short, a trained head of the list is asked too, if its expected gain exceeds its
cost: to replace the draft, or to continue it.

Where the output has a grammar and its drafter is in the list, drafters interleave: forced tokens, then a
segment by the first drafter that fills the free part, then the next forced tokens.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from paceline.config import warn_renamed
from paceline.drafters.support.grammar_filter import FORCED, grammar_valid, unforced, valid_prefix
from paceline.log import origin
from paceline.types import (
    NO_DRAFT,
    ROOT,
    Ask,
    Cursor,
    Draft,
    Drafter,
    DrafterEstimates,
    HiddenRows,
    Scores,
    Seq,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor

ROW_COST: Final = 0.05  # of a pass: verifying one more node
UNKNOWN_COST: Final = 0.2  # of a pass: a head that was not asked yet
PROBE_EVERY: Final = 16  # times a head that does not pay is skipped before it is asked again
GAIN_DECAY: Final = 0.93  # weight of earlier drafts in a head's expected gain
GAIN_PRIOR: Final = 1.0  # tokens

Failure = tuple[str, str]  # a drafter's name, and the error's type and position in the code
log: Final = logging.getLogger("paceline")


class DrafterList(Drafter):
    """Each segment of a draft is by one drafter, which is asked in one call for all sequences.

    A drafter that fails costs its draft, and nothing else.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        estimates: DrafterEstimates | None = None,
        failures: set[Failure] | None = None,
        timer: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """estimates: of the controller; without them every score is believed.

        failures: those logged already; lists that share drafters share it. timer: nanoseconds.
        """
        self._timer = timer
        self.drafters = tuple(map(_with_new_names, drafters))
        self._failures = set() if failures is None else failures
        self.name = "+".join(drafter.name for drafter in self.drafters)
        self.taps = tuple(sorted({tap for drafter in self.drafters for tap in drafter.taps}))
        self.draft_ns: dict[str, int] = {}  # of the last draft, by drafter
        self._observers = tuple(
            d for d in self.drafters if getattr(d.observe, "__func__", None) is not Drafter.observe
        )
        self._interleaves = any(drafter.interleaves for drafter in self.drafters)
        self._heads = tuple(drafter for drafter in self.drafters[1:] if drafter.taps)
        self._value = _HeadValue(estimates or _NothingKnown())

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.draft_ns.clear()
        if len(asks) == 1 and asks[0].cursor is None and not self._heads:
            return [self._first_draft(asks[0])]
        if not self._interleaves:
            asks = [replace(ask, forced_budget=0) if ask.forced_budget else ask for ask in asks]
        drafts = [_DraftInProgress(ask) for ask in asks]
        growing = [draft for draft in drafts if not draft.ended]
        segments = 0
        while growing:
            self._add_segment(growing, segments)
            segments += 1
            growing = [draft for draft in growing if len(draft.segments) == segments and not draft.ended]
        for head in self._heads:
            self._improve(head, [draft for draft in drafts if draft.may_improve(head)])
        return [draft.joined() for draft in drafts]

    def _first_draft(self, ask: Ask) -> Draft:
        """Without a grammar and heads nothing continues a draft."""
        for drafter in self.drafters:
            if draft := self._ask(drafter, [ask])[0]:
                return draft
        return NO_DRAFT

    def _improve(self, head: Drafter, drafts: Sequence["_DraftInProgress"]) -> None:
        """Lets a head replace or continue drafts that other drafters made."""
        pairs = [(d, ask) for d in drafts if (ask := self._value.further_ask(head, d.ask, d.segments[0]))]
        answers = self._ask(head, [ask for _, ask in pairs]) if pairs else []
        for (draft, ask), answer in zip(pairs, answers, strict=True):
            if ask is not draft.ask:
                draft.segments += [answer] if answer else []
            elif _is_scored(answer) and self._value.gain(answer) > self._value.gain(draft.segments[0]):
                draft.segments = [answer]

    def _ask(self, drafter: Drafter, asks: Sequence[Ask]) -> list[Draft]:
        """One draft for each ask, whatever the drafter does."""
        started = self._timer()
        try:
            drafts = _checked(drafter.draft(asks), len(asks))
        except Exception as problem:
            self._log_failure(drafter, "this round has none of its drafts", problem)
            drafts = [NO_DRAFT] * len(asks)
        name = drafter.name
        self.draft_ns[name] = self.draft_ns.get(name, 0) + self._timer() - started
        if drafter in self._heads:
            self._value.learn(drafter, [d for ask, d in zip(asks, drafts, strict=True) if not ask.after])
        return drafts

    def _add_segment(self, drafts: Sequence["_DraftInProgress"], before: int) -> None:
        """One more segment for each draft that a drafter can continue; all have `before` segments so far."""
        for drafter in self.drafters:
            candidates = [d for d in drafts if len(d.segments) == before and d.may_ask(drafter)]
            free = [d for d in candidates if d.ask.cursor is None] if drafter in self._heads else []
            if free and not self._value.pays(drafter):
                candidates = [d for d in candidates if d not in free]
            if candidates:
                answers = self._ask(drafter, [d.ask for d in candidates])
                for draft, answer in zip(candidates, answers, strict=True):
                    try:
                        draft.add(drafter, answer)
                    except Exception as problem:
                        self._log_failure(drafter, "this round has none of its drafts", problem)

    def begin(self, seq: Seq) -> None:
        for drafter in self.drafters:
            try:
                drafter.begin(seq)
            except Exception as problem:
                self._log_failure(drafter, "the request begins without it", problem)

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        for drafter in self._observers:
            try:
                drafter.observe(seqs, verdicts, scores)
            except Exception as problem:
                self._log_failure(drafter, "the request continues", problem)

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        for drafter in self.drafters:
            if drafter.taps:
                try:
                    drafter.on_hidden(hidden_rows)
                except Exception as problem:
                    self._log_failure(drafter, "the request continues", problem)

    def end(self, seq: Seq) -> None:
        for drafter in self.drafters:
            try:
                drafter.end(seq)
            except Exception as problem:
                self._log_failure(drafter, "the request ends all the same", problem)

    def _log_failure(self, drafter: Drafter, consequence: str, problem: Exception) -> None:
        """Each kind of failure is logged once, with its message."""
        failure = (drafter.name, origin(problem))
        if failure not in self._failures:
            self._failures.add(failure)
            text = _message(problem)
            log.error("drafter %s failed; %s: %s (%s)", drafter.name, consequence, text, failure[1])
        log.debug("drafter %s failed", drafter.name, exc_info=problem)


def _message(problem: Exception, max_chars: int = 200) -> str:
    """The first line of its message, which may be long or missing."""
    lines = str(problem).splitlines() or [type(problem).__name__]
    return lines[0] if len(lines[0]) <= max_chars else f"{lines[0][: max_chars - 3]}..."


class _OldNames(Drafter):
    """A drafter written for 0.1, with `read` and `takes_turns`."""

    def __init__(self, drafter: Any) -> None:
        self.name, self.taps, self._drafter = drafter.name, drafter.taps, drafter
        self.interleaves = bool(getattr(drafter, "takes_turns", False))
        self._read = getattr(drafter, "read", None) or drafter.on_hidden

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts: list[Draft] = self._drafter.draft(asks)
        return drafts

    def begin(self, seq: Seq) -> None:
        self._drafter.begin(seq)

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        self._drafter.observe(seqs, verdicts, scores)

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        self._read(hidden_rows)

    def end(self, seq: Seq) -> None:
        self._drafter.end(seq)


def _with_new_names(drafter: Drafter) -> Drafter:
    inherited = getattr(type(drafter), "on_hidden", Drafter.on_hidden) is Drafter.on_hidden
    reads = bool(drafter.taps) and hasattr(drafter, "read") and inherited
    turns = hasattr(drafter, "takes_turns") and not getattr(drafter, "interleaves", False)
    if reads:
        warn_renamed("Drafter.read", "Drafter.on_hidden")
    if turns:
        warn_renamed("Drafter.takes_turns", "Drafter.interleaves")
    return _OldNames(drafter) if reads or turns else drafter


class _NothingKnown(DrafterEstimates):
    """Believes every score."""


class _HeadValue:
    """Decides whether to ask a trained head, by its expected gain in tokens and its cost in passes."""

    def __init__(self, estimates: DrafterEstimates) -> None:
        self._estimates = estimates
        self._gains: defaultdict[str, float] = defaultdict(lambda: GAIN_PRIOR)
        self._skipped: Counter[str] = Counter()

    def gain(self, draft: Draft) -> float:
        """Tokens that a draft with scores is expected to add, less the cost of verifying them."""
        return self._gain(self._estimates.chances(draft))

    def _gain(self, chances: Sequence[float]) -> float:
        return sum(max(0.0, chance - ROW_COST) for chance in chances)

    def _cost(self, head: Drafter) -> float:
        cost = self._estimates.cost(head.name)
        return UNKNOWN_COST if cost is None else cost

    def pays(self, head: Drafter) -> bool:
        """True: ask it where no other drafter has a draft. Now and then also where it does not pay."""
        if self._gains[head.name] > self._cost(head):
            return True
        self._skipped[head.name] += 1
        return self._skipped[head.name] % PROBE_EVERY == 0

    def further_ask(self, head: Drafter, ask: Ask, draft: Draft) -> Ask | None:
        """The ask for a head beside this draft: to replace it, to continue it, or None."""
        chances = self._estimates.chances(draft)
        gain, reach = self._gain(chances), chances[-1] if chances else 1.0
        replaces = self._gains[head.name] - gain
        continues = reach * self._gains[head.name] if ask.budget > len(draft) else 0.0
        if max(replaces, continues) <= self._cost(head) * (1 + gain):  # tokens lost by the longer round
            return None
        if replaces >= continues:
            return ask
        return Ask(ask.seq, ask.budget - len(draft), (*ask.after, *draft.tokens), None, ask.forced_budget)

    def learn(self, head: Drafter, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            if draft and _is_scored(draft):
                gain = self.gain(draft)
                self._gains[head.name] = GAIN_DECAY * self._gains[head.name] + (1 - GAIN_DECAY) * gain


class _DraftInProgress:
    """One draft, as it goes from drafter to drafter."""

    __slots__ = ("ask", "ended", "last", "rejected_sources", "segments")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask  # for what follows the segments so far
        self.segments: list[Draft] = []
        self.last: Drafter | None = None  # of the last segment
        self.rejected_sources: list[str] = []  # the drafter of each token the grammar rejected
        self.ended = ask.cursor is not None and ask.cursor.finished

    def may_ask(self, drafter: Drafter) -> bool:
        if self.ask.cursor is None:
            return True
        if self.last is not None:
            interleaved = drafter.interleaves or self.last.interleaves
            if not interleaved or drafter is self.last:
                return False
        return self.ask.budget > 0 or (drafter.interleaves and self.ask.forced_budget > 0)

    def may_improve(self, head: Drafter) -> bool:
        """A draft may be dropped for its tokens only if it was not sampled; with a grammar it never is."""
        if self.ask.cursor is not None or len(self.segments) != 1 or self.last is head or self.ask.budget < 1:
            return False
        spec, draft = self.ask.seq.spec, self.segments[0]
        may_drop = spec.accept == "match" and spec.tree_width == 1
        return may_drop and draft.parents is None and _is_scored(draft)

    def add(self, drafter: Drafter, draft: Draft) -> None:
        """Adds a segment, if any of the draft is within the budget and grammar-valid."""
        cursor = self.ask.cursor
        segment, end = (draft, None) if cursor is None else self._segment(drafter, draft, cursor)
        if segment:
            self.segments.append(segment)
            self.last = drafter
            self.ended = end is None or end.finished
            if end is not None:
                self.ask = _ask_after(self.ask, segment, end)

    def _segment(self, drafter: Drafter, draft: Draft, cursor: Cursor) -> tuple[Draft, Cursor | None]:
        """The segment and the grammar state after it: None for a tree, and for invalid sampled tokens.

        A segment that was not sampled ends where tokens are forced: drafters that interleave continue.
        """
        draft = _with_sources(draft, drafter)
        if not is_chain(draft):
            valid = grammar_valid(cursor, draft)
            self.rejected_sources += (Counter(draft.sources) - Counter(valid.sources)).elements()
            return _within_budget(valid, self.ask), None
        draft = _within_budget(draft, self.ask)
        hand_over = draft.q is None and self.ask.forced_budget > 0 and not drafter.interleaves
        taken, end = valid_prefix(cursor, draft.tokens, until_forced=hand_over)
        if draft.q is None:
            if not end.finished and not (hand_over and taken and end.forced()):
                self.rejected_sources += draft.sources[taken:]
            return draft.first(taken), end
        return draft, end if taken == len(draft) else None

    def joined(self) -> Draft:
        whole, rejected = joined(self.segments), tuple(self.rejected_sources)
        return replace(whole, rejected_sources=rejected) if rejected else whole


def _checked(drafts: list[Draft], count: int) -> list[Draft]:
    if len(drafts) != count:
        raise ValueError(f"{len(drafts)} drafts for {count} asks")
    return drafts


def _is_scored(draft: Draft) -> bool:
    return len(draft.scores) == len(draft.sources) == len(draft)


def is_chain(draft: Draft) -> bool:
    return draft.parents is None or draft.parents == tuple(range(ROOT, len(draft) - 1))


def _with_sources(draft: Draft, drafter: Drafter) -> Draft:
    """Each node with its source; only drafters that interleave can claim forced tokens."""
    sources = draft.sources or (drafter.name,) * len(draft)
    scores = draft.scores if drafter.interleaves else tuple(unforced(score) for score in draft.scores)
    return replace(draft, sources=sources, scores=scores)


def _within_budget(draft: Draft, ask: Ask) -> Draft:
    """The first nodes, up to the first that exceeds the budget for its kind."""
    left = {True: ask.forced_budget, False: ask.budget}
    for node in range(len(draft)):
        forced = _is_forced(draft, node)
        if not left[forced]:
            return draft.first(node)
        left[forced] -= 1
    return draft


def _is_forced(draft: Draft, node: int) -> bool:
    return draft.q is None and len(draft.scores) > node and draft.scores[node] == FORCED


def _ask_after(ask: Ask, segment: Draft, end: Cursor) -> Ask:
    forced = sum(_is_forced(segment, node) for node in range(len(segment)))
    budget = ask.budget - (len(segment) - forced)
    return Ask(ask.seq, budget, (*ask.after, *segment.tokens), end, ask.forced_budget - forced)


def joined(segments: Sequence[Draft]) -> Draft:
    """One draft of segments that follow one another; all but the last are chains."""
    if len(segments) < 2:
        return segments[0] if segments else NO_DRAFT
    tokens = tuple(token for segment in segments for token in segment.tokens)
    sources = tuple(source for segment in segments for source in segment.sources)
    scored = all(segment.scores for segment in segments)
    scores = tuple(score for segment in segments for score in segment.scores) if scored else ()
    return Draft(tokens, _parents(segments), sources, scores, _q(segments))


def _parents(segments: Sequence[Draft]) -> tuple[int, ...] | None:
    *chains, last = segments
    if is_chain(last):
        return None
    start = sum(map(len, chains))
    return (*range(ROOT, start - 1), *(start + last.parent(node) for node in range(len(last))))


def _q(segments: Sequence[Draft]) -> "Tensor | None":
    """A token that was not sampled has a one-hot q."""
    sampled = [segment.q for segment in segments if segment.q is not None]
    if not sampled:
        return None
    vocab, start = sampled[0].shape[1], 0
    rows = sampled[0].new_zeros(sum(map(len, segments)), vocab)
    for segment in segments:
        if segment.q is not None:
            rows[start : start + len(segment)] = segment.q
        else:
            for node, token in enumerate(segment.tokens, start):
                if 0 <= token < vocab:
                    rows[node, token] = 1
        start += len(segment)
    return rows
