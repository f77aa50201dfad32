"""A scheduled sequence: its part in one pass, and the round it becomes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from paceline.constraints.draft_masks import FREE, Masks
from paceline.errors import PacelineError
from paceline.types import NO_DRAFT, Draft, Finish, Round, Seq, TokenLogprob, Verdict


@dataclass(frozen=True, slots=True)
class Pass:
    """The size and the time of one pass, shared by its sequences."""

    batch: int
    rows: int
    draft_us: int
    target_us: int
    draft_us_by: Mapping[str, int] = field(default_factory=dict)  # drafter -> its part


@dataclass(slots=True)
class Scheduled:
    """One sequence's part in a pass; each phase of the step fills in its fields."""

    seq: Seq
    fed: list[int]  # pending tokens that go in
    scored: bool  # False: more of the prompt is still to come
    budget: int = 0  # nodes to draft
    forced_budget: int = 0  # nodes to draft besides, which the grammar forces
    draft: Draft = NO_DRAFT
    drafted: int = 0  # nodes of the draft before any was cut
    masks: Masks = FREE
    verdict: Verdict | None = None
    kept_nodes: tuple[int, ...] | None = None  # nodes whose cache rows stay; None: not committed

    @property
    def rows(self) -> int:
        return len(self.fed) + len(self.draft)

    def round(
        self,
        cost: Pass,
        path: tuple[int, ...] = (),
        tokens: tuple[int, ...] = (),
        finish: Finish | None = None,
        error: PacelineError | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Round:
        """The record of this pass, after these tokens were committed."""
        return Round(
            request=self.seq.id,
            start=len(self.seq.tokens) - len(tokens),
            drafters=self.seq.spec.drafters,
            draft=self.draft,
            path=path,
            tokens=tokens,
            budget=self.budget,
            batch=cost.batch,
            rows=cost.rows,
            draft_us=cost.draft_us,
            target_us=cost.target_us,
            finish=finish,
            error=error,
            logprobs=logprobs,
            drafted=self.drafted,
            draft_us_by=cost.draft_us_by,
        )


def by_drafters(scheduled: Sequence[Scheduled]) -> Iterator[list[Scheduled]]:
    """Sequences with the same list of drafters, together."""
    ordered = sorted(scheduled, key=lambda s: s.seq.spec.drafters)
    for _, group in groupby(ordered, key=lambda s: s.seq.spec.drafters):
        yield list(group)
