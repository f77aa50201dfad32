"""For each token the tokens that may follow it, and how often such guesses come true."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEVELS: Final = 16  # how sure the target was of a successor, in this many steps
SEEDS: Final = 4  # the same for successors that were only read in a prompt
NOBODY: Final = -1  # fills up short lists
FORGET: Final = 0.999  # weight of old evidence at each new one
FIRST: Final = 64  # lists there is room for at first

# How often guesses of each level come true, until a table has seen some of its own; from agent traffic.
PRIOR: Final = np.array([*(0.6 * (level + 0.5) / LEVELS for level in range(LEVELS)), 0.08, 0.12, 0.2, 0.55])
WEIGHT: Final = 20.0  # guesses that the prior is worth

Ids = NDArray[np.int64]
Successors = list[tuple[int, float]]


class Table:
    """Lists of successors, in rows that are found by token; what is written last counts."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._row: dict[int, int] = {}
        self._tokens: NDArray[np.int32] = np.full((FIRST, width), NOBODY, np.int32)
        self._levels: NDArray[np.uint8] = np.zeros((FIRST, width), np.uint8)
        self._right = WEIGHT * PRIOR
        self._tried = np.full(len(PRIOR), WEIGHT)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def room(self) -> int:
        """Lists there is memory for."""
        return len(self._tokens)

    def copy(self) -> "Table":
        twin = copy(self)
        twin._row = dict(self._row)
        for name in ("_tokens", "_levels", "_right", "_tried"):
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def successors(self, token: int) -> Successors:
        """The tokens that may follow, each with its chance, likeliest first."""
        row = self._row.get(token)
        if row is None:
            return []
        chances = (self._right / self._tried)[self._levels[row]].tolist()
        found = [(t, c) for t, c in zip(self._tokens[row].tolist(), chances, strict=True) if t != NOBODY]
        return sorted(found, key=lambda pair: -pair[1])

    def write(self, tokens: Sequence[int], successors: Ids, chances: NDArray[np.float32]) -> None:
        """Row i of successors follows tokens[i]; the target gave them these chances."""
        self._put(tokens, successors, np.minimum(chances * LEVELS, LEVELS - 1).astype(np.uint8))

    def read(self, prompt: Sequence[int]) -> None:
        """Tokens never met before are followed by what follows them in the prompt, most often first."""
        follow: defaultdict[int, list[int]] = defaultdict(list)
        for after, token in pairwise(reversed(prompt)):
            if token not in self._row:
                follow[token].append(after)
        successors = np.full((len(follow), self.width), NOBODY)
        levels = np.zeros((len(follow), self.width), np.uint8)
        for row, said in enumerate(follow.values()):
            common = Counter(said).most_common(self.width)  # of equals, the last in the text first
            for place, (token, n) in enumerate(common):
                successors[row, place] = token
                levels[row, place] = LEVELS + min(SEEDS - 1, SEEDS * n // len(said))
        self._put(list(follow), successors, levels)

    def learn(self, tokens: Sequence[int]) -> None:
        """These were said one after the other: were they among the successors?"""
        said = [(self._row[a], b) for a, b in pairwise(tokens) if a in self._row]
        if not said:
            return
        rows = np.array([row for row, _ in said])
        there = self._tokens[rows] != NOBODY
        right = self._tokens[rows] == np.array([[token] for _, token in said])
        levels = self._levels[rows]
        keep = FORGET ** len(said)
        self._tried = keep * self._tried + np.bincount(levels[there], minlength=len(PRIOR))
        self._right = keep * self._right + np.bincount(levels[right], minlength=len(PRIOR))

    def _put(self, tokens: Sequence[int], successors: Ids, levels: NDArray[np.uint8]) -> None:
        rows = [self._row.setdefault(token, len(self._row)) for token in tokens]
        if len(self._row) > self.room:
            more = ((0, max(self.room, len(self._row) - self.room)), (0, 0))
            self._tokens = np.pad(self._tokens, more, constant_values=NOBODY)
            self._levels = np.pad(self._levels, more)
        self._tokens[rows] = NOBODY
        self._tokens[rows, : successors.shape[1]] = successors
        self._levels[rows, : successors.shape[1]] = levels
