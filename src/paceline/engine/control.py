"""How far to draft: the length with the highest expected tokens per time, 0 where none pays."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.engine.estimates import CostCurve, ListEstimates, Prior
from paceline.types import Controller, Draft, DrafterEstimates, Round, Seq

MARGIN: Final = 1.03  # a draft must promise this many times the rate of plain decoding
PROBE_EVERY: Final = 32  # plain rounds before one is spent on finding out whether drafting pays again
PROBE_LENGTH: Final = 2  # nodes
CHEAP_DRAFT_SHARE: Final = 0.05  # of a pass: time that drafting may take without a plan
MIN_ROUNDS: Final = 8  # rounds after which the recent gain decides


class Fixed(Controller):
    """Always as far as the request allows.

    It has no estimates: scores of trained heads are believed as they are, not calibrated.
    """

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [seq.spec.max_draft for seq in seqs]

    def learn(self, rounds: Sequence[Round]) -> None:
        return


class Rate(Controller):
    """Picks the draft length with the most expected tokens per measured time, 0 included.

    Drafts with scores are cut afterwards, node by node. Where one more node costs next to nothing, they are
    made as long as the request allows; else their length follows from the acceptance so far. Their recent
    gain decides whether they are made at all, if they cost anything.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self.cost = CostCurve(prior)
        self._lists: defaultdict[tuple[str, ...], ListEstimates] = defaultdict(ListEstimates)
        # Lists whose drafts of this pass must not be cut to nothing.
        self._probing: set[tuple[str, ...]] = set()

    def estimates(self, drafters: tuple[str, ...]) -> DrafterEstimates:
        return self._lists[drafters]

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        self._probing.clear()
        return [self._budget(seq, rows) if seq.spec.adaptive else seq.spec.max_draft for seq in seqs]

    def _budget(self, seq: Seq, rows: int) -> int:
        if not seq.spec.max_draft:
            return 0
        spec, context, known = seq.spec, len(seq.tokens), self._lists[seq.spec.drafters]
        draft_us, max_draft, plain_us = known.draft_us, spec.max_draft, self.cost(rows, context)
        cheap_us = CHEAP_DRAFT_SHARE * plain_us
        trimmed = spec.accept == "match" and known.scored
        if trimmed and draft_us(max_draft) < cheap_us:
            return max_draft
        tokens = known.acceptance.expected(max_draft)
        costs = self.cost.curve(rows, len(tokens), context)
        rates = [t / (us + draft_us(k)) for k, (t, us) in enumerate(zip(tokens, costs, strict=True))]
        best = max(range(len(rates)), key=rates.__getitem__)
        if trimmed and known.gain.rounds >= MIN_ROUNDS:
            flat = draft_us(max_draft) - draft_us(1) < cheap_us
            best = max_draft if flat else max(best, PROBE_LENGTH)
            pays = known.gain.rate(self.cost, rows, context) * plain_us >= MARGIN
            return best if pays else self._probe(spec.drafters, best, max_draft)
        if best and rates[best] >= MARGIN * rates[0]:
            return best
        return self._probe(spec.drafters, PROBE_LENGTH, max_draft)

    def trim(self, seqs: Sequence[Seq], drafts: Sequence[Draft], rows: int) -> list[int]:
        """Adds nodes of all sequences by their chance of being accepted, while the rate grows."""
        lengths = [len(draft) for draft in drafts]
        chances = {
            i: self._lists[seq.spec.drafters].chances(drafts[i])
            for i, seq in enumerate(seqs)
            if _may_trim(seq, drafts[i])
        }
        if not chances:
            return lengths
        lengths = [0 if i in chances else nodes for i, nodes in enumerate(lengths)]
        rows += sum(lengths)
        context = max(len(seq.tokens) for seq in seqs)
        tokens = float(len(seqs))
        plain = best = tokens / self.cost(rows, context)
        best_lengths, taken = list(lengths), list(lengths)
        for added, (_, i, node) in enumerate(_by_chance(chances), 1):
            tokens += chances[i][node]
            taken[i] = node + 1
            rate = tokens / self.cost(rows + added, context)
            if rate > best:
                best, best_lengths = rate, list(taken)
        if best >= MARGIN * plain:
            return best_lengths
        planned = frozenset(self._probing)
        for i in chances:
            names, length = seqs[i].spec.drafters, len(drafts[i])
            probe = min(PROBE_LENGTH, length)
            lengths[i] = probe if names in planned else self._probe(names, PROBE_LENGTH, length)
        self._probing.clear()
        return lengths

    def _probe(self, drafters: tuple[str, ...], length: int, max_length: int) -> int:
        known = self._lists[drafters]
        known.plain_rounds += 1
        if known.plain_rounds % PROBE_EVERY:
            return 0
        self._probing.add(drafters)
        return min(length, max_length)

    def learn(self, rounds: Sequence[Round]) -> None:
        nodes, drafted = sum(len(r.draft) for r in rounds), sum(r.drafted for r in rounds)
        for r in rounds:
            if len(r.draft):
                self._learn_acceptance(r)
        decoding = bool(rounds) and rounds[0].rows == len(rounds) + nodes  # no prompt is in the pass
        for r in {r.drafters: r for r in rounds}.values():
            self._lists[r.drafters].costs.learn(r, decoding)
        if not decoding:  # drafters may have read the prompt too
            return
        self.cost.learn(rounds[0].rows, rounds[0].target_us, max(r.start for r in rounds))
        for r in rounds:
            if r.drafted:
                draft_us = r.draft_us * r.drafted / drafted
                self._lists[r.drafters].draft_us.learn(r.drafted, draft_us, r.target_us)
                if not r.finish:
                    self._lists[r.drafters].gain.learn(r, draft_us)

    def forget(self, drafter: str) -> None:
        for names in [names for names in self._lists if drafter in names]:
            self._lists[names] = self._lists[names].without(drafter)

    def forget_list(self, drafters: tuple[str, ...]) -> None:
        self._lists.pop(drafters, None)

    def _learn_acceptance(self, r: Round) -> None:
        accepted = _unforced(r.draft, r.path)
        depth = max(_unforced(r.draft, path) for path in r.draft.paths())
        verified = accepted if r.finish else depth  # nodes beyond the end of the output were not rejected
        known = self._lists[r.drafters]
        known.acceptance.learn(verified, accepted)
        known.scored = bool(r.draft.scores)
        if known.scored:
            known.scores.learn(r)


def _unforced(draft: Draft, path: Sequence[int]) -> int:
    """The nodes on a path that could have been rejected."""
    return sum(draft.scores[node] < 1 for node in path) if draft.scores else len(path)


def _may_trim(seq: Seq, draft: Draft) -> bool:
    """A sampled node must not be dropped for its token, unless the target chooses by itself."""
    return seq.spec.adaptive and seq.spec.accept == "match" and len(draft.scores) == len(draft) > 0


def _by_chance(chances: Mapping[int, Sequence[float]]) -> list[tuple[float, int, int]]:
    """All nodes as (-chance, draft, node), most likely first; no node before an earlier one of its draft."""
    ordered: list[tuple[float, int, int]] = []
    for i, of_draft in chances.items():
        smallest = 1.0
        for node, chance in enumerate(of_draft):
            smallest = min(smallest, chance)
            ordered.append((-smallest, i, node))
    return sorted(ordered)
