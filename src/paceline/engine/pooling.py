"""Embeddings: the hidden states of a text, pooled to one vector of length 1.

As sentence-transformers does it, after the final norm: their mean, the last token's, or the first one's.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.types import HiddenReader, HiddenRows

Pooling = Literal["mean", "last", "cls"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


class Pooler(HiddenReader):
    """Pools the rows of one sequence as they are computed, each position once, however often it comes.

    A sequence that gave its place back may have some of its rows computed again.
    """

    def __init__(self, pooling: str, last_layer: int, norm: Callable[[Tensor], Tensor]) -> None:
        """norm: the model's final one, of rows [n, width]."""
        if pooling not in POOLINGS:
            raise UsageError(
                f"the model pools its embeddings by {pooling!r}, which is not supported: "
                f"expected one of {', '.join(POOLINGS)}"
            )
        self.taps = (last_layer,)
        self._pooling, self._norm = pooling, norm
        self._position = 0  # the next one to come
        self._sum: Tensor | None = None  # [width] float64: of what is kept of the rows so far

    @property
    def needs_all_rows(self) -> bool:
        """True: none may come from a cache, as the states of those are not known."""
        return self._pooling != "last"

    def on_hidden(self, rows: HiddenRows) -> None:
        states = rows.hidden[self.taps[0]]
        end = rows.start + len(states)
        if end <= self._position:
            return
        new = states[max(0, self._position - rows.start) :]
        if self._pooling == "last":
            self._sum = self._normed(new[-1:])
        elif self._pooling == "mean":
            self._sum = self._normed(new) if self._sum is None else self._sum + self._normed(new)
        elif self._position == 0:
            self._sum = self._normed(new[:1])
        self._position = end

    def _normed(self, rows: Tensor) -> Tensor:
        return self._norm(rows).double().sum(0).cpu()

    def vector(self) -> Tensor:
        """[width] float32, of length 1."""
        assert self._sum is not None, "no row has come"
        return torch.nn.functional.normalize(self._sum, dim=0).float()
