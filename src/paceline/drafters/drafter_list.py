"""A list of drafters is a drafter: the first with a draft wins, segment by segment.

Where that draft is unsure or short, a trained head of the list is asked too, if that is expected to pay: to
replace the draft, or to continue it. The controller's policy decides whom to ask.

Where the output has a grammar and its drafter is in the list, drafters interleave: forced tokens, then a
segment by the first drafter that fills the free part, then the next forced tokens.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
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
    DraftPolicy,
    HiddenRows,
    Scores,
    Seq,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor

Failure = tuple[str, str]  # a drafter's name, and the error's type and position in the code
log: Final = logging.getLogger("paceline")


class DrafterList(Drafter):
    """Each segment of a draft is by one drafter, which is asked in one call for all sequences.

    A drafter that fails costs its draft, and nothing else.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: DraftPolicy | None = None,
        failures: set[Failure] | None = None,
        timer: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """policy: the controller's; without one every drafter is asked and every score believed.

        failures: those logged already; lists that share drafters share it. timer: nanoseconds.
        """
        self._timer = timer
        self.drafters = tuple(map(_with_new_names, drafters))
        self._failures = set() if failures is None else failures
        self.name = "+".join(drafter.name for drafter in self.drafters)
        self.taps = tuple(sorted({tap for drafter in self.drafters for tap in drafter.taps}))
        self.draft_ns: dict[str, int] = {}  # of the last draft, by drafter
        self.asked: dict[str, list[str]] = {}  # for the last draft, by sequence
        self.read_ns: dict[str, int] = {}  # of hidden states since the last draft, by drafter
        self._beginning, self._ending = self._overriding("begin"), self._overriding("end")
        self._observers, self._preparing = self._overriding("observe"), self._overriding("prepare")
        self._idling = self._overriding("idle")
        own = __name__.partition(".")[0] + "."
        self._foreign = {d.name for d in drafters if not type(d).__module__.startswith(own)}
        self._unconstrained = tuple(d for d in self.drafters if not _needs_grammar(d))
        self._names = tuple(d.name for d in self.drafters)
        self._unconstrained_names = tuple(d.name for d in self._unconstrained)
        self._tapped = tuple(drafter for drafter in self.drafters if drafter.taps)
        self._interleaves = any(drafter.interleaves for drafter in self.drafters)
        self._heads = tuple(drafter for drafter in self.drafters[1:] if drafter.taps)
        self._policy = policy or _AskAll()

    def _overriding(self, method: str) -> tuple[Drafter, ...]:
        """The members that do something there; drafters need not have the method."""
        inherited, found = getattr(Drafter, method), [(d, getattr(d, method, None)) for d in self.drafters]
        return tuple(
            d for d, own in found if callable(own) and getattr(own, "__func__", own) is not inherited
        )

    @property
    def observes(self) -> bool:
        """True if a member learns from verdicts."""
        return bool(self._observers)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        self.draft_ns.clear()
        self.asked.clear()
        if all(ask.cursor is None for ask in asks):
            return self._free_drafts(asks)
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
            able = [draft for draft in drafts if self._is_ready(head, draft.ask.seq)]
            self._improve(head, [draft for draft in able if draft.may_improve(head)])
        return [draft.joined() for draft in drafts]

    def _free_drafts(self, asks: Sequence[Ask]) -> list[Draft]:
        """Without a grammar only heads continue or replace a draft."""
        drafts, by = self._first_drafts(asks)
        for head in self._heads:
            others = [i for i, draft in enumerate(drafts) if draft and self._is_ready(head, asks[i].seq)]
            some = [_DraftInProgress(asks[i], drafts[i], by[i]) for i in others]
            self._improve(head, [draft for draft in some if draft.may_improve(head)])
            for i, draft in zip(others, some, strict=True):
                drafts[i] = draft.joined()
        return drafts

    def _first_drafts(self, asks: Sequence[Ask]) -> tuple[list[Draft], list[Drafter | None]]:
        """For each ask the draft of the first drafter that has one, and that drafter."""
        drafts, by = [NO_DRAFT] * len(asks), list[Drafter | None]([None]) * len(asks)
        left, budget = list(enumerate(asks)), self._policy.budget
        for drafter in self._unconstrained:
            name, able = drafter.name, left
            if drafter.taps:
                able = [(i, ask) for i, ask in left if self._is_ready(drafter, ask.seq)]
            chosen = [
                (i, _within(ask, nodes)) for i, ask in able if (nodes := budget(name, ask.seq, ask.budget))
            ]
            if not chosen:
                continue
            for (i, _), draft in zip(chosen, self._ask(drafter, [ask for _, ask in chosen]), strict=True):
                drafts[i], by[i] = draft, drafter
            if not (left := [(i, ask) for i, ask in left if not drafts[i]]):
                break
        return drafts, by

    def _is_ready(self, drafter: Drafter, seq: Seq) -> bool:
        """A head that has not read the last pass has no draft: an ask would cost time and teach nothing."""
        try:
            return drafter.ready(seq) if hasattr(drafter, "ready") else True  # drafters need not say so
        except Exception as problem:
            self._log_failure(drafter, "this round has none of its drafts", problem)
            return False

    def _improve(self, head: Drafter, drafts: Sequence["_DraftInProgress"]) -> None:
        """Lets a head replace or continue drafts that other drafters made."""
        chosen = [(d, ask, replaces) for d in drafts for ask, replaces in self._further_ask(head, d)]
        answers = self._ask(head, [ask for _, ask, _ in chosen]) if chosen else []
        for (draft, _, replaces), answer in zip(chosen, answers, strict=True):
            if not replaces:
                draft.segments += [answer] if answer else []
            elif (
                answer
                and _is_scored(answer)
                and self._gain(draft, answer) > self._gain(draft, draft.segments[0])
            ):
                draft.segments = [answer]

    def _further_ask(self, head: Drafter, d: "_DraftInProgress") -> Iterator[tuple[Ask, bool]]:
        """At most one ask for a head beside a draft; True: to replace it, False: to continue it."""
        seq, policy, draft, budget = d.ask.seq, self._policy, d.segments[0], d.ask.budget
        chances, left = policy.chances(seq, draft), budget - len(draft)
        gain, reach = self._gain(d, draft), chances[-1] if chances else 1.0
        replaces = policy.value(head.name, seq, gain=gain)
        continues = policy.value(head.name, seq, reach) if left > 0 else 0.0
        if max(replaces, continues) <= 0:
            return
        if replaces >= continues:
            if nodes := policy.budget(head.name, seq, budget, gain=gain):
                yield _within(d.ask, nodes), True
        elif nodes := policy.budget(head.name, seq, left, reach):
            yield Ask(seq, nodes, (*d.ask.after, *draft.tokens), None, d.ask.forced_budget), False

    def _gain(self, d: "_DraftInProgress", draft: Draft) -> float:
        return self._policy.gain(d.ask.seq, draft)

    def _ask(self, drafter: Drafter, asks: Sequence[Ask]) -> list[Draft]:
        """One draft for each ask, whatever the drafter does."""
        started = self._timer()
        try:
            drafts = _checked(drafter.draft(asks), len(asks))
            if drafter.name in self._foreign:
                drafts = [well_formed(draft) for draft in drafts]
            drafts = [_named(draft, drafter) for draft in drafts]
        except Exception as problem:
            self._log_failure(drafter, "this round has none of its drafts", problem)
            drafts = [NO_DRAFT] * len(asks)
        name = drafter.name
        self.draft_ns[name] = self.draft_ns.get(name, 0) + self._timer() - started
        for ask in asks:
            self.asked.setdefault(ask.seq.id, []).append(name)
        self._policy.drafted(name, asks, drafts)
        return drafts

    def _add_segment(self, drafts: Sequence["_DraftInProgress"], before: int) -> None:
        """One more segment for each draft that a drafter can continue; all have `before` segments so far."""
        for drafter in self.drafters:
            candidates = [d for d in drafts if len(d.segments) == before and d.may_ask(drafter)]
            if drafter.taps:
                candidates = [d for d in candidates if self._is_ready(drafter, d.ask.seq)]
            asks = [(d, ask) for d in candidates if (ask := self._segment_ask(drafter, d)) is not None]
            answers = self._ask(drafter, [ask for _, ask in asks]) if asks else []
            for (draft, _), answer in zip(asks, answers, strict=True):
                depth = len(draft.ask.after)
                try:
                    draft.add(drafter, answer)
                except Exception as problem:
                    self._log_failure(drafter, "this round has none of its drafts", problem)
                if len(draft.segments) > before and not draft.ended:
                    chances = self._policy.chances(draft.ask.seq, draft.segments[-1], depth)
                    draft.reach *= chances[-1] if chances else 1.0

    def _segment_ask(self, drafter: Drafter, d: "_DraftInProgress") -> Ask | None:
        """The ask for one more segment, if it is expected to pay."""
        ask = d.ask
        forced = ask.forced_budget if drafter.interleaves else 0
        nodes = self._policy.budget(drafter.name, ask.seq, ask.budget + forced, d.reach, forced=forced)
        if not nodes:
            return None
        return ask if drafter.interleaves else _within(ask, nodes)

    def begin(self, seq: Seq) -> None:
        for drafter in self._beginning:
            try:
                drafter.begin(seq)
            except Exception as problem:
                self._log_failure(drafter, "the request begins without it", problem)

    def prepare(self, seq: Seq) -> None:
        for drafter in self._preparing:
            try:
                drafter.prepare(seq)
            except Exception as problem:
                self._log_failure(drafter, "its first draft starts afresh", problem)

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        for drafter in self._observers:
            try:
                drafter.observe(seqs, verdicts, scores)
            except Exception as problem:
                self._log_failure(drafter, "the request continues", problem)

    def idle(self, done: set[str] | None = None) -> None:
        """done: members of other lists that have had their time in this pass; those of this one are added."""
        for drafter in self._idling:
            if done is not None:
                if drafter.name in done:
                    continue
                done.add(drafter.name)
            try:
                drafter.idle()
            except Exception as problem:
                self._log_failure(drafter, "its work is left undone", problem)

    def worth_asking(self, seq: Seq) -> bool:
        """False where no member would be asked for this sequence in this pass."""
        names = self._unconstrained_names if seq.cursor is None else self._names
        return self._policy.worth_asking(names, seq)

    def readers(self, seq: Seq) -> tuple[str, ...]:
        """The drafters that read this sequence in this pass."""
        return tuple([d.name for d in self._tapped if self._policy.reads(d.name, seq)])

    def taps_of(self, names: Sequence[str]) -> set[int]:
        return {tap for d in self._tapped if d.name in names for tap in d.taps}

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        self.show_hidden(hidden_rows, {rows.seq.id: [d.name for d in self._tapped] for rows in hidden_rows})

    def show_hidden(self, hidden_rows: Sequence[HiddenRows], readers: Mapping[str, Sequence[str]]) -> None:
        """readers: of each sequence, as they were before the pass."""
        for drafter in self._tapped:
            name = drafter.name
            rows = [r for r in hidden_rows if name in readers[r.seq.id]]
            if not rows:
                continue
            started = self._timer()
            try:
                drafter.on_hidden(rows)
            except Exception as problem:
                self._log_failure(drafter, "the request continues", problem)
            self.read_ns[name] = self.read_ns.get(name, 0) + self._timer() - started

    def end(self, seq: Seq) -> None:
        for drafter in self._ending:
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


class _AskAll(DraftPolicy):
    """Asks every drafter and believes every score."""


def _needs_grammar(drafter: Drafter) -> bool:
    """True if it drafts only where the output has a grammar; drafters need not say so."""
    return bool(getattr(drafter, "needs_grammar", False))


def _within(ask: Ask, nodes: int) -> Ask:
    """The ask for so many nodes at most."""
    if nodes >= ask.budget:
        return ask
    return Ask(ask.seq, nodes, ask.after, ask.cursor, ask.forced_budget)


class _DraftInProgress:
    """One draft, as it goes from drafter to drafter."""

    __slots__ = ("ask", "ended", "last", "reach", "rejected_sources", "segments")

    def __init__(self, ask: Ask, first: Draft = NO_DRAFT, by: Drafter | None = None) -> None:
        self.ask = ask  # for what follows the segments so far
        self.segments: list[Draft] = [first] if first else []
        self.reach = 1.0  # P(all segments are accepted)
        self.last = by  # the drafter of the last segment
        self.rejected_sources: list[str] = []  # the drafter of each token the grammar rejected
        self.ended = ask.cursor is not None and ask.cursor.finished

    def may_ask(self, drafter: Drafter) -> bool:
        if self.ask.cursor is None:
            return not _needs_grammar(drafter)
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
        draft = _without_forced(draft, drafter)
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


def well_formed(draft: Draft) -> Draft:
    """The same draft, with whole numbers as tokens; ValueError where a field cannot be right.

    For drafters from elsewhere: what this lets pass costs time at most. Tokens beyond the vocabulary do.
    """
    if not isinstance(draft, Draft):
        raise ValueError(f"an object of type {type(draft).__name__} for a Draft")
    size, tokens = len(draft.tokens), tuple(map(index, draft.tokens))
    parents = None if draft.parents is None else tuple(map(index, draft.parents))
    if parents is not None and not all(ROOT <= parent < node for node, parent in enumerate(parents)):
        raise ValueError("a node of the draft comes before its parent")
    for name, values in (("parents", parents), ("sources", draft.sources), ("scores", draft.scores)):
        if values and len(values) != size:
            raise ValueError(f"{len(values)} {name} for {size} tokens")
    if parents is not None and len(parents) != size:
        raise ValueError(f"{len(parents)} parents for {size} tokens")
    if not all(isinstance(source, str) for source in draft.sources):
        raise ValueError("a source of the draft is not a text")
    if not all(0 <= score <= 1 for score in draft.scores):
        raise ValueError("a score of the draft is not between 0 and 1")
    if draft.q is not None and (draft.q.dim() != 2 or len(draft.q) != size):
        raise ValueError(f"q has the shape {tuple(draft.q.shape)}: expected a row for each of {size} tokens")
    return replace(draft, tokens=tokens, parents=parents)


def _is_scored(draft: Draft) -> bool:
    return len(draft.scores) == len(draft.sources) == len(draft)


def is_chain(draft: Draft) -> bool:
    return draft.parents is None or draft.parents == tuple(range(ROOT, len(draft) - 1))


def _named(draft: Draft, drafter: Drafter) -> Draft:
    """Each node with its source, by which estimates are kept; drafters need not give it."""
    return draft if draft.sources or not draft else replace(draft, sources=(drafter.name,) * len(draft))


def _without_forced(draft: Draft, drafter: Drafter) -> Draft:
    """Only drafters that interleave can claim forced tokens."""
    scores = draft.scores if drafter.interleaves else tuple(unforced(score) for score in draft.scores)
    return replace(draft, scores=scores)


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
