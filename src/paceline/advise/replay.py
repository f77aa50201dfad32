"""Acceptance of a drafter on recorded text, without a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import empty

from paceline.config import SpecConfig
from paceline.types import ROOT, Ask, Draft, Drafter, Scores, Seq, Verdict

NO_SCORES = Scores(empty(0, 0), ())


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Counts of a replay."""

    tokens: int = 0  # recorded
    passes: int = 0  # of the target, to write the same text
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    def __add__(self, other: "ReplayStats") -> "ReplayStats":
        return ReplayStats(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    output: Sequence[int],
    budget: int = 8,
    *,
    tenant: str = "",
    prediction: Sequence[int] = (),
    tree_width: int = 1,
) -> ReplayStats:
    """Drafts along `output` as if the target were writing it.

    The drafter sees no hidden states and no scores.
    """
    spec = SpecConfig(tree_width=tree_width)
    seq = Seq("replay", list(prompt), len(prompt), spec=spec, tenant=tenant, prediction=tuple(prediction))
    stats = ReplayStats()
    drafter.begin(seq)
    while stats.tokens < len(output):
        (draft,) = drafter.draft([Ask(seq, budget)])
        rest = output[stats.tokens :]
        path = follow(draft, rest)[: len(rest) - 1]
        committed = rest[: len(path) + 1]
        seq.tokens.extend(committed)
        drafter.observe([seq], [Verdict(path, committed[-1])], NO_SCORES)
        stats += ReplayStats(len(committed), 1, len(draft), len(path))
    drafter.end(seq)
    return stats


def follow(draft: Draft, text: Sequence[int]) -> tuple[int, ...]:
    """The nodes of `draft` that match `text`."""
    path: list[int] = []
    for token in text:
        node = draft.child(path[-1] if path else ROOT, token)
        if node is None:
            break
        path.append(node)
    return tuple(path)
