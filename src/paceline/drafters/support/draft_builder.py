"""The node list of a draft in progress, for drafters that extend trees by different policies."""

from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.drafters.support.grammar_filter import unforced
from paceline.sampling import Doubles
from paceline.types import ROOT, Draft


@dataclass(slots=True)
class DraftBuilder:
    """Nodes in the order of their creation: parents precede their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Doubles] = field(default_factory=list)  # [vocab] for each node, or empty

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float) -> int:
        """Adds a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(unforced(score))
        return len(self.tokens) - 1

    def draft(self, source: str) -> Draft:
        chain = self.parents == list(range(ROOT, len(self.tokens) - 1))
        parents = None if chain else tuple(self.parents)
        q = torch.from_numpy(np.stack(self.q)) if self.q else None
        return Draft(tuple(self.tokens), parents, (source,) * len(self.tokens), tuple(self.scores), q)
