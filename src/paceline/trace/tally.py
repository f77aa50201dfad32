"""Counts of one output, from its rounds."""

from collections import Counter
from dataclasses import dataclass, field

from paceline.types import Round, TokenLogprob


@dataclass(slots=True)
class Tally:
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # who guessed each token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    passes: int = 0
    drafted: Counter[str] = field(default_factory=Counter)  # nodes by source
    accepted: Counter[str] = field(default_factory=Counter)
    draft_us: int = 0
    target_us: int = 0

    def add(self, r: Round) -> None:
        self.tokens += r.tokens
        self.sources += r.sources
        self.logprobs += r.logprobs
        self.passes += 1
        self.drafted.update(r.draft.sources)
        self.accepted.update(r.draft.sources[i] for i in r.path)
        self.draft_us += r.draft_us
        self.target_us += r.target_us
