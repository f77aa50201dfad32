"""Whether to ask a drafter where another one has a guess already: by what it brings and what it costs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final

from paceline.types import Ask, Draft, Drafter, Verdict

FORGET: Final = 0.93
ROW: Final = 0.05  # of a pass: what it costs to check a guess
TRY_EVERY: Final = 16  # times that a drafter is passed over, before it is asked to see whether it pays again
SOON: Final = 0.2  # of a pass: what a drafter costs that was not asked yet
MOST_TRUST: Final = 1.2


@dataclass(slots=True)
class _Known:
    """Of one drafter."""

    true: float = 2.0  # guesses that were right
    claimed: float = 2.0  # and how many it thought would be
    brings: float = 1.0  # tokens that a draft is expected to add
    costs: float = 0.0  # nanoseconds of a draft; 0: unknown
    passed_over: int = 0  # times

    @property
    def trust(self) -> float:
        return min(self.true / self.claimed, MOST_TRUST)


class Worth:
    """What a list of drafters has seen of its own."""

    def __init__(self) -> None:
        self._known: defaultdict[str, _Known] = defaultdict(_Known)
        self._pass = 0.0  # nanoseconds of a round without its draft; 0: unknown
        self._drafted = 0  # when

    def expects(self, draft: Draft) -> tuple[float, float]:
        """Tokens that a chain will add, less what it costs to check it, and the chance that all is right."""
        adds, reach = 0.0, 1.0
        for source, score in zip(draft.sources, draft.scores, strict=True):
            reach *= min(1.0, self._known[source].trust * score)
            adds += max(0.0, reach - ROW)
        return adds, reach

    def pays(self, drafter: Drafter) -> bool:
        """Whether to ask it where nobody has a guess."""
        known = self._known[drafter.name]
        if known.brings > self._share(known):
            return True
        known.passed_over += 1
        return known.passed_over % TRY_EVERY == 0

    def _share(self, known: _Known) -> float:
        """Of a pass: what a draft costs."""
        return known.costs / self._pass if known.costs and self._pass else SOON

    def further(self, drafter: Drafter, ask: Ask, draft: Draft) -> Ask | None:
        """What to ask a drafter where there is this draft: to do better, to go on, or nothing."""
        adds, reach = self.expects(draft)
        known = self._known[drafter.name]
        better, more = known.brings - adds, reach * known.brings if ask.budget > len(draft) else 0.0
        if max(better, more) <= self._share(known) * (
            1 + adds
        ):  # tokens of a round that takes so much longer
            return None
        if better >= more:
            return ask
        return Ask(ask.seq, ask.budget - len(draft), (*ask.after, *draft.tokens), None, ask.forced_budget)

    def drafted(self, drafter: Drafter, drafts: Sequence[Draft], took_ns: int) -> None:
        known = self._known[drafter.name]
        known.costs = took_ns if not known.costs else FORGET * known.costs + (1 - FORGET) * took_ns
        for draft in drafts:
            if len(draft.scores) == len(draft.sources) == len(draft) > 0:
                known.brings = FORGET * known.brings + (1 - FORGET) * self.expects(draft)[0]

    def pass_begins(self) -> None:
        self._drafted = perf_counter_ns()

    def judged(self, verdicts: Sequence[Verdict]) -> None:
        if self._drafted:
            took, self._drafted = perf_counter_ns() - self._drafted, 0
            self._pass = took if not self._pass else FORGET * self._pass + (1 - FORGET) * took
        for verdict in verdicts:
            draft = verdict.draft
            if draft.parents is not None or len(draft.scores) != len(draft):
                continue
            right = len(verdict.path)
            for node in range(min(right + 1, len(draft))):
                known = self._known[draft.sources[node]]
                known.true = FORGET * known.true + (node < right)
                known.claimed = FORGET * known.claimed + draft.scores[node]
