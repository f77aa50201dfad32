"""How far to guess: as far as makes the expected rate of tokens largest, and not at all if nothing pays."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.engine.cost_model import CostCurve, Prior
from paceline.types import ROOT, Controller, Draft, Round, Seq

MAX_POSITION: Final = 16  # acceptance is learned by place in the draft, up to here
PRIOR: Final = (1.4, 2.0)  # accepted and tried, before anything is known
FORGET: Final = 0.97  # weight of old evidence at each new one
MARGIN: Final = 1.03  # a draft must promise this much over plain decoding
PROBE_EVERY: Final = 32  # plain rounds before one is spent on finding out whether drafting pays again
PROBE: Final = 2
CHEAP: Final = 0.05  # share of a pass that drafting may cost to be done without a plan
SAME: Final = 0.25  # spread of the drafts' lengths, in nodes squared, below which they count as of one length
TRIED: Final = 8  # rounds after which it is known what drafts bring
FORGET_YIELD: Final = 0.9
MOST_TRUST: Final = 1.2  # drafters that are too modest are believed this much more


class Fixed(Controller):
    """Always as far as the request allows."""

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [seq.spec.max_draft for seq in seqs]

    def learn(self, rounds: Sequence[Round]) -> None:
        return


class Acceptance:
    """P(position i is accepted | all before it were), for one list of drafters."""

    def __init__(self) -> None:
        self._cells = [PRIOR] * MAX_POSITION

    def learn(self, drafted: int, accepted: int) -> None:
        for i in range(min(drafted, accepted + 1, MAX_POSITION)):  # nothing is known of later positions
            hit, tried = self._cells[i]
            self._cells[i] = (FORGET * hit + (i < accepted), FORGET * tried + 1)

    def expected(self, k: int) -> list[float]:
        """Tokens of a round with a draft of 0, 1, ... k."""
        tokens, survive, out = 1.0, 1.0, [1.0]
        for i in range(k):
            hit, tried = self._cells[min(i, MAX_POSITION - 1)]
            survive *= hit / tried
            tokens += survive
            out.append(tokens)
        return out


class Trust:
    """How often a drafter's guesses come true, against how sure it was of them."""

    def __init__(self) -> None:
        self._true: defaultdict[str, float] = defaultdict(lambda: PRIOR[1])
        self._claimed: defaultdict[str, float] = defaultdict(lambda: PRIOR[1])

    def learn(self, r: Round) -> None:
        """Judged were the nodes that follow the last committed token or a node that was kept."""
        kept = {ROOT, *r.path}
        for node, score in enumerate(r.draft.scores):
            parent = r.draft.parent(node)
            if parent not in kept or (r.finish and parent == (r.path[-1] if r.path else ROOT)):
                continue
            source = r.draft.sources[node]
            if score < 1:
                self._true[source] = FORGET * self._true[source] + (node in kept)
                self._claimed[source] = FORGET * self._claimed[source] + score

    def forget(self, source: str) -> None:
        self._true.pop(source, None)
        self._claimed.pop(source, None)

    def reach(self, draft: Draft) -> list[float]:
        """For each node the chance that it is kept."""
        trust = {s: min(self._true[s] / self._claimed[s], MOST_TRUST) for s in set(draft.sources)}
        reach: list[float] = []
        for node, (score, source) in enumerate(zip(draft.scores, draft.sources, strict=True)):
            parent = draft.parent(node)
            chance = min(1.0, trust[source] * score) if score < 1 else 1.0
            reach.append(chance * (1.0 if parent == ROOT else reach[parent]))
        return reach


class DraftTime:
    """Microseconds of a draft by its nodes: some for any draft at all, and some for each node.

    Which is which shows only in drafts of different lengths; until then each node has its share.
    """

    def __init__(self) -> None:
        self._weight = self._nodes = self._us = self._squares = self._products = 0.0

    def learn(self, nodes: int, us: float, target_us: int) -> None:
        us = min(us, 3 * max(self(nodes), target_us))  # hiccups weigh little
        self._weight = FORGET * self._weight + 1
        self._nodes = FORGET * self._nodes + nodes
        self._us = FORGET * self._us + us
        self._squares = FORGET * self._squares + nodes * nodes
        self._products = FORGET * self._products + nodes * us

    def __call__(self, nodes: int) -> float:
        if not self._weight or not nodes:
            return 0.0
        mean, us = self._nodes / self._weight, self._us / self._weight
        spread = self._squares / self._weight - mean**2
        together = self._products / self._weight - mean * us
        share = us / mean
        slope = min(max((together + SAME * share) / (spread + SAME), 0.0), share)
        return us + slope * (nodes - mean)


class Yield:
    """What drafts brought and cost of late, those included of which nothing was checked."""

    def __init__(self) -> None:
        self.rounds, self._tokens, self._nodes, self._us = 0, 0.0, 0.0, 0.0

    def learn(self, r: Round, draft_us: float) -> None:
        self.rounds += 1
        weight = max(1 - FORGET_YIELD, 1 / self.rounds)
        self._tokens += weight * (len(r.tokens) - self._tokens)
        self._nodes += weight * (len(r.draft) - self._nodes)
        self._us += weight * (min(draft_us, 3 * max(self._us, r.target_us)) - self._us)

    def rate(self, cost: CostCurve, rows: int, context: int) -> float:
        """Tokens for a microsecond."""
        return self._tokens / (cost(rows + round(self._nodes), context) + self._us)


@dataclass(slots=True)
class _Known:
    """Of one list of drafters."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    trust: Trust = field(default_factory=Trust)
    draft_us: DraftTime = field(default_factory=DraftTime)
    past: Yield = field(default_factory=Yield)
    sure: bool = False  # they said how sure they were, the last time
    plain_rounds: int = 0


class Rate(Controller):
    """Picks the draft length with the most expected tokens per measured time, 0 included.

    Drafters that say how sure they are have their drafts cut afterwards. Where a further guess costs next to
    nothing, these are made as long as the request allows; else their length is planned by what was accepted
    before. Whether they are made at all follows from what they brought of late, if it costs anything.
    What is learned is kept by list of drafters: a new request starts with what earlier ones taught.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self.cost = CostCurve(prior)
        self._known: defaultdict[tuple[str, ...], _Known] = defaultdict(_Known)
        self._probing: set[tuple[str, ...]] = set()  # whose drafts of this pass are not to be cut to nothing

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        self._probing.clear()
        return [self._budget(seq, rows) if seq.spec.adaptive else seq.spec.max_draft for seq in seqs]

    def _budget(self, seq: Seq, rows: int) -> int:
        spec, context, known = seq.spec, len(seq.tokens), self._known[seq.spec.drafters]
        draft_us, most, plain = known.draft_us, spec.max_draft, self.cost(rows, context)
        trimmed = spec.accept == "match" and known.sure
        if trimmed and draft_us(most) < CHEAP * plain:
            return most
        tokens = known.acceptance.expected(most)
        rates = [t / (self.cost(rows + k, context) + draft_us(k)) for k, t in enumerate(tokens)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if trimmed and known.past.rounds >= TRIED:
            best = most if draft_us(most) - draft_us(1) < CHEAP * plain else max(best, PROBE)
            pays = known.past.rate(self.cost, rows, context) * plain >= MARGIN
            return best if pays else self._probe(spec.drafters, best, most)
        if best and rates[best] >= MARGIN * rates[0]:
            return best
        return self._probe(spec.drafters, PROBE, most)

    def trim(self, seqs: Sequence[Seq], drafts: Sequence[Draft], rows: int) -> list[int]:
        """Nodes go in by their chance of being kept, whose ever they are, while the rate grows."""
        keep = [len(draft) for draft in drafts]
        loose = [i for i, seq in enumerate(seqs) if _may_trim(seq, drafts[i])]
        reach = {i: self._known[seqs[i].spec.drafters].trust.reach(drafts[i]) for i in loose}
        if not reach:
            return keep
        keep = [0 if i in reach else nodes for i, nodes in enumerate(keep)]
        rows += sum(keep)
        context = max(len(seq.tokens) for seq in seqs)
        tokens = float(len(seqs))
        plain = best = tokens / self.cost(rows, context)
        chosen, taken = list(keep), list(keep)
        for added, (_, i, node) in enumerate(_by_reach(reach), 1):
            tokens += reach[i][node]
            taken[i] = node + 1
            rate = tokens / self.cost(rows + added, context)
            if rate > best:
                best, chosen = rate, list(taken)
        if best >= MARGIN * plain:
            return chosen
        planned = frozenset(self._probing)
        for i in reach:
            name, length = seqs[i].spec.drafters, len(drafts[i])
            keep[i] = min(PROBE, length) if name in planned else self._probe(name, PROBE, length)
        self._probing.clear()
        return keep

    def _probe(self, drafters: tuple[str, ...], length: int, most: int) -> int:
        known = self._known[drafters]
        known.plain_rounds += 1
        if known.plain_rounds % PROBE_EVERY:
            return 0
        self._probing.add(drafters)
        return min(length, most)

    def learn(self, rounds: Sequence[Round]) -> None:
        nodes, guessed = sum(len(r.draft) for r in rounds), sum(r.drafted for r in rounds)
        for r in rounds:
            if len(r.draft):
                self._learn_acceptance(r)
        if not rounds or rounds[0].rows != len(rounds) + nodes:  # a prompt, which drafters may have read too
            return
        self.cost.learn(rounds[0].rows, rounds[0].target_us, max(r.start for r in rounds))
        for r in rounds:
            if r.drafted:
                draft_us = r.draft_us * r.drafted / guessed
                self._known[r.drafters].draft_us.learn(r.drafted, draft_us, r.target_us)
                if not r.finish:
                    self._known[r.drafters].past.learn(r, draft_us)

    def forget(self, drafter: str) -> None:
        for names in [names for names in self._known if drafter in names]:
            trust = self._known[names].trust
            trust.forget(drafter)
            self._known[names] = _Known(trust=trust)  # the others of the list are who they were

    def _learn_acceptance(self, r: Round) -> None:
        accepted = _risky(r.draft, r.path)
        depth = max(_risky(r.draft, path) for path in r.draft.paths())
        judged = accepted if r.finish else depth  # what lies beyond an end was not refused
        known = self._known[r.drafters]
        known.acceptance.learn(judged, accepted)
        known.sure = bool(r.draft.scores)
        if known.sure:
            known.trust.learn(r)


def _risky(draft: Draft, path: Sequence[int]) -> int:
    """The guesses on a path that could have been wrong."""
    return sum(draft.scores[node] < 1 for node in path) if draft.scores else len(path)


def _may_trim(seq: Seq, draft: Draft) -> bool:
    """A guess that was drawn must not be dropped for what it says, unless the target chooses by itself."""
    return seq.spec.adaptive and seq.spec.accept == "match" and len(draft.scores) == len(draft) > 0


def _by_reach(reach: Mapping[int, Sequence[float]]) -> list[tuple[float, int, int]]:
    """All nodes, likeliest first; no node before an earlier one of its draft."""
    found: list[tuple[float, int, int]] = []
    for i, chances in reach.items():
        least = 1.0
        for node, chance in enumerate(chances):
            least = min(least, chance)
            found.append((-least, i, node))
    return sorted(found)
