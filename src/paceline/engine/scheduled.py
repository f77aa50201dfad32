"""One sequence's part in a pass, and what the pass cost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from paceline.constraints.draft_masks import FREE, Masks
from paceline.errors import PacelineError
from paceline.types import NO_DRAFT, Draft, Finish, Round, Seq, TokenLogprob, Verdict


@dataclass(slots=True)
class Scheduled:
    """One sequence's part in a pass."""

    seq: Seq
    fed: list[int]  # pending tokens that go in
    scored: bool  # False: more of the prompt is still to come
    budget: int = 0  # guesses wanted
    forced_budget: int = 0  # nodes wanted besides that the grammar forces
    draft: Draft = NO_DRAFT
    drafted: int = 0  # nodes it had before any was cut
    masks: Masks = FREE
    verdict: Verdict | None = None
    kept: tuple[int, ...] | None = None  # the draft's nodes whose rows stay; None: the turn was not committed

    @property
    def rows(self) -> int:
        return len(self.fed) + len(self.draft)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward cost, shared by its sequences."""

    batch: int
    rows: int
    draft_us: int
    target_us: int
    draft_us_by: Mapping[str, int] = field(default_factory=dict)  # drafter -> its part


def a_round(
    turn: Scheduled,
    cost: Pass,
    path: tuple[int, ...] = (),
    tokens: tuple[int, ...] = (),
    finish: Finish | None = None,
    error: PacelineError | None = None,
    logprobs: tuple[TokenLogprob, ...] = (),
) -> Round:
    """A turn that has committed these tokens."""
    return Round(
        request=turn.seq.id,
        start=len(turn.seq.tokens) - len(tokens),
        drafters=turn.seq.spec.drafters,
        draft=turn.draft,
        path=path,
        tokens=tokens,
        budget=turn.budget,
        batch=cost.batch,
        rows=cost.rows,
        draft_us=cost.draft_us,
        target_us=cost.target_us,
        finish=finish,
        error=error,
        logprobs=logprobs,
        drafted=turn.drafted,
        draft_us_by=cost.draft_us_by,
    )


def by_drafters(turns: Sequence[Scheduled]) -> Iterator[list[Scheduled]]:
    ordered = sorted(turns, key=lambda t: t.seq.spec.drafters)
    for _, group in groupby(ordered, key=lambda t: t.seq.spec.drafters):
        yield list(group)
