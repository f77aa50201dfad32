"""A list of drafters is a drafter."""

from collections.abc import Sequence

from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Scores, Seq, Verdict


class FirstOf(Drafter):
    """Each ask is answered by the first drafter that has a guess for it."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in self.drafters)
        self.taps = tuple(sorted({tap for drafter in self.drafters for tap in drafter.taps}))

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(asks)
        for drafter in self.drafters:
            open_asks = [i for i, draft in enumerate(drafts) if not draft]
            if not open_asks:
                break
            for i, draft in zip(open_asks, drafter.draft([asks[i] for i in open_asks]), strict=True):
                drafts[i] = draft
        return drafts

    def begin(self, seq: Seq) -> None:
        for drafter in self.drafters:
            drafter.begin(seq)

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        for drafter in self.drafters:
            drafter.observe(seqs, verdicts, scores)

    def end(self, seq: Seq) -> None:
        for drafter in self.drafters:
            drafter.end(seq)
